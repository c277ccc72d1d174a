"""Arguments of a checkpoint beside those of the run that resumes from it: what differs, and what comes of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Where a run is and how it is shown: different on each start, and nothing follows from it.
OF_ONE_START = {
    "resume_from_checkpoint", "output_dir", "overwrite_output_dir", "logging_dir", "local_rank", "disable_tqdm",
    "log_level", "log_level_replica", "hub_token", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "do_train", "do_eval", "do_predict",
}  # fmt: skip

RATE = "from here on, with the schedule's position kept"
SHAPE = "the new schedule from here on, at the rate that it has for this step"
HERE = "takes effect from here on"
ORDER = "from the next epoch on; an epoch that is under way is finished in the checkpoint's order"
LENGTH = "the new length; the rate goes on from where it stands towards the new end"
EFFECTS: dict[str, str] = {
    "learning_rate": RATE,
    "lr_groups": RATE,
    "layerwise_lr_decay": RATE,
    "lr_scheduler_type": SHAPE,
    "lr_scheduler_kwargs": SHAPE,
    "warmup_steps": SHAPE,
    "max_steps": LENGTH,
    "num_train_epochs": LENGTH,
    "per_device_train_batch_size": "from here on; each sample of the epoch under way is still seen once",
    "gradient_accumulation_steps": "from here on; each sample of the epoch under way is still seen once",
    "seed": "no effect on a resume: random states come from the checkpoint",
    "data_seed": "no effect on a resume: the checkpoint's order of samples goes on",
    "train_sampling_strategy": ORDER,
    "shuffle_method": ORDER,
    "length_column_name": ORDER,
    "full_determinism": "takes effect, but steps before it were not deterministic",
    "metric_for_best_model": "judges from here on; the best so far was found by the old one",
    "greater_is_better": "judges from here on; the best so far was found the other way round",
}
FUSED = ("_fused", "_torch")  # variants of one optimizer, whose states are the same
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


@dataclass(frozen=True, slots=True)
class Difference:
    """One argument whose value in the checkpoint is another than now."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.before!r} -> {self.now!r}: {EFFECTS.get(self.name, HERE)}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What both know and hold different values of, in the order of the fields."""
    return [
        Difference(name, before[name], value)
        for name, value in now.items()
        if name in before and name not in OF_ONE_START and not _is_same(before[name], value)
    ]


def contradictions(found: list[Difference], *, has_own_optimizer: bool) -> Iterator[str]:
    """Differences that no resume can carry out, in words."""
    for one in found:
        if one.name == "optim" and not has_own_optimizer and _family(one.before) != _family(one.now):
            yield (
                f"optim={one.now!r}, and the checkpoint holds the state of optim={one.before!r}, which means nothing "
                f"to another optimizer. Resume with optim={one.before!r}, or start a new run from the checkpoint's "
                "weights."
            )
        crosses = [value in FOLLOW_EVALUATIONS for value in (one.before, one.now)]
        if one.name == "lr_scheduler_type" and one.before != one.now and any(crosses):
            yield (
                f"lr_scheduler_type={one.now!r}, and the checkpoint was written under {one.before!r}: of these two one "
                f"counts evaluations, or both do in their own way. Resume with lr_scheduler_type={one.before!r}."
            )


def _family(optimizer: Any) -> str:
    name = str(optimizer)
    for suffix in FUSED:
        name = name.removesuffix(suffix)
    return name


def _is_same(before: Any, now: Any) -> bool:
    """Equal as numbers, texts, lists and dicts; JSON knows no tuples and no int beside a float."""
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in before)
    if isinstance(before, bool) or isinstance(now, bool):
        return before is now
    return bool(before == now)
