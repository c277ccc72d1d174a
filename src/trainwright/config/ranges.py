"""What a single field may hold: numbers within limits, words from a list. Rules between fields are in rules.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from trainwright.config.fields import DDP_BACKENDS, LOG_LEVELS, PACKING, SAMPLING, START_METHODS
from trainwright.config.owned import is_anothers


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; None only where `optional`."""

    low: float
    high: float | None = None
    whole: bool = False
    optional: bool = False
    open_low: bool = False
    open_high: bool = False
    hint: str = ""

    def problem(self, name: str, value: Any) -> str | None:  # Any: what a user passed
        if value is None and self.optional:
            return None
        if not isinstance(value, Integral if self.whole else Real):
            text = " It is text; YAML reads 5e-5 as text, write 5.0e-5." if isinstance(value, str) else ""
            return f"{name}={value!r} is not {'a whole' if self.whole else 'a'} number.{text}"
        if self.allows(float(value)):
            return None
        return f"{name}={value!r} is out of range: it must be {self}.{' ' + self.hint if self.hint else ''}"

    def allows(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        below = self.high is None or (number < self.high if self.open_high else number <= self.high)
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return low if self.high is None else f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"


COUNT = Range(1, whole=True)
MAYBE_COUNT = Range(1, whole=True, optional=True)
NATURAL = Range(0, whole=True)
NOT_NEGATIVE = Range(0)
BETA = Range(0, 1, open_high=True)
SEED = Range(0, 2**32 - 1, whole=True)

RANGES: Mapping[str, Range] = {
    "seed": SEED,
    "data_seed": Range(0, 2**64 - 1, whole=True, optional=True),
    "num_train_epochs": NOT_NEGATIVE,
    "max_steps": Range(-1, whole=True, hint="-1 trains by num_train_epochs."),
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "learning_rate": NOT_NEGATIVE,
    "warmup_steps": Range(0, hint="Below 1 it is a share of all steps."),
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": BETA,
    "adam_beta2": BETA,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": Range(0, optional=True, hint="0 turns clipping off."),
    "label_smoothing_factor": BETA,
    "neftune_noise_alpha": Range(0, optional=True),
    "torch_empty_cache_steps": MAYBE_COUNT,
    "eval_delay": Range(0, optional=True),
    "eval_accumulation_steps": MAYBE_COUNT,
    "save_total_limit": Range(1, whole=True, optional=True, hint="None keeps all; save_strategy='no' saves none."),
    "save_keep_every_steps": MAYBE_COUNT,
    "dataloader_num_workers": NATURAL,
    "dataloader_prefetch_factor": MAYBE_COUNT,
    "ddp_timeout": Range(0, open_low=True),
    "hang_timeout": Range(0),
    "ddp_bucket_cap_mb": Range(0, open_low=True, optional=True),
    "generation_max_length": MAYBE_COUNT,
    "generation_num_beams": MAYBE_COUNT,
    "past_index": Range(-1, whole=True, hint="-1 feeds no past state."),
    "tpu_num_cores": MAYBE_COUNT,
    "max_tokens_per_batch": MAYBE_COUNT,
    "packing_length": Range(2, whole=True, optional=True),
}

CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "log_level": LOG_LEVELS,
    "log_level_replica": LOG_LEVELS,
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "train_sampling_strategy": SAMPLING,
    "dataloader_multiprocessing_context": (None, *START_METHODS),
    "ddp_backend": (None, *DDP_BACKENDS),
    "packing": (None, *PACKING),
    "packing_overflow": ("error", "split"),
    "loss_weighting": ("batches", "items"),
    "save_failure": ("stop", "continue"),
    "shuffle_method": ("auto", "permutation", "feistel"),
}


def out_of_range(args: Any) -> Iterator[str]:
    """The problems of single fields. Fields that `args` lacks, or uses for something else, are passed over."""
    for name, limits in RANGES.items():
        if is_anothers(args, name):
            continue
        if hasattr(args, name) and (problem := limits.problem(name, getattr(args, name))):
            yield problem
    for name, allowed in CHOICES.items():
        value = allowed[0] if is_anothers(args, name) else getattr(args, name, allowed[0])
        if getattr(value, "value", value) not in allowed:
            words = ", ".join(repr(word) for word in allowed if word is not None)
            yield f"{name}={value!r} is not allowed. Allowed: {words}{', or None' if None in allowed else ''}."
