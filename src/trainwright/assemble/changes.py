"""What a resumed run does with settings that differ from its checkpoint's, and with the states of callbacks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright._types import TRAINING_ARGS_JSON_NAME
from trainwright.config.plans import OPEN_END
from trainwright.config.resumed import Difference, contradictions, differences
from trainwright.errors import (
    CheckpointError,
)
from trainwright.optim import schedule_resume
from trainwright.optim.schedules import make_schedule
from trainwright.state.trainer_state import TrainerState


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of the run that wrote a checkpoint: how long it was to be, and which arguments differ now."""

    num_steps: int
    differences: list[Difference]


def before(checkpoint: str, args: Any, state: TrainerState, *, has_own_optimizer: bool) -> Before:
    """Compares the arguments with those in a checkpoint; transformers writes none that can be read safely.

    Raises:
        CheckpointError: two that no resume can carry out.
    """
    try:
        then = json.loads((Path(checkpoint) / TRAINING_ARGS_JSON_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        then = None
    now = json.loads(args.to_json_string())
    found = differences(then, now) if isinstance(then, dict) else []
    problems = list(contradictions(found, has_own_optimizer=has_own_optimizer))
    if problems:
        raise CheckpointError(f"{checkpoint} cannot be resumed from with these arguments:\n  " + "\n  ".join(problems))
    return Before(state.max_steps, found)


def carry_on(
    optimizer: Any,
    scheduler: Any,
    asked: schedule_resume.RequestedSettings,
    then: Before,
    *,
    args: Any,
    num_steps: int,
    is_own: bool,
) -> list[str]:
    """Lets what differs take effect in the loaded states; returns it as lines.

    `asked` is what the arguments made of both before they were loaded; `is_own` is a schedule that is not ours.
    """
    changed = {one.name: (one.before, one.now) for one in then.differences}
    lines = [str(one) for one in then.differences]
    rate = schedule_resume.changed_rate(optimizer, asked)
    if rate is not None and "learning_rate" not in changed:  # another trainer's checkpoint, or a user's optimizer
        changed["learning_rate"] = rate
        lines.append(str(Difference("learning_rate", *rate)))
    schedule_resume.apply_changes(optimizer, scheduler, asked, changed)
    is_new = not changed.keys().isdisjoint(schedule_resume.SHAPES)

    def build(stand_in: Any, length: int) -> Any:
        warmup, options = args.get_warmup_steps(length), args.lr_scheduler_kwargs
        return make_schedule(
            args.lr_scheduler_type, stand_in, num_warmup_steps=warmup, num_training_steps=length, options=options
        )

    if not is_own:
        length = then.num_steps if num_steps == OPEN_END else num_steps  # without a length no rate depends on one
        schedule_resume.continue_towards(scheduler, build, before=then.num_steps, now=length, is_new=is_new)
    if num_steps != then.num_steps and then.num_steps > 0 and OPEN_END not in (num_steps, then.num_steps):
        how = "" if is_own or is_new else "; the rate goes on from where it stands towards the new end, without a jump"
        lines.append(f"length {then.num_steps} -> {num_steps} steps{how}")
    return lines


def restore_callbacks(states: dict[str, Any], callbacks: Iterable[Any], *, with_settings: bool) -> None:
    """Gives callbacks their state back, matched by class; their own settings stay unless `with_settings`."""
    waiting = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for callback in callbacks:
        state = waiting.get(type(callback).__name__)
        if not state or not callable(getattr(callback, "state", None)):
            continue
        saved, now = state.pop(0), callback.state()
        for part in ("args", "attributes") if with_settings else ("attributes",):
            values = saved.get(part) if isinstance(saved, dict) else None
            for name, value in values.items() if isinstance(values, dict) else ():
                if name in now.get(part, {}):  # what a callback does not export is not set either
                    setattr(callback, name, value)
