"""The first steps of two trainers, on copies of both: where do their values part? `Trainer.compare_with`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from trainwright.callbacks.base import TrainerCallback
from trainwright.capabilities.recorded_values.value_comparison import ValuesReport, compare_values, read_values
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.preflight.prove import quietly, short_copy
from trainwright.preflight.trainer_copy import AnyTrainer
from trainwright.state.trainer_state import TrainerControl, TrainerState


def compare_with(trainer: AnyTrainer, other: AnyTrainer, *, num_steps: int, tolerance: float | None) -> ValuesReport:
    """Records and compares the first steps of copies of two trainers; see `Trainer.compare_with`."""
    if num_steps < 1:
        raise ArgumentError(f"num_steps={num_steps} records nothing. Write a number of steps from 1 on.")
    if not hasattr(other, "prove"):
        raise ArgumentError(
            f"compare_with() got {type(other).__module__}.{type(other).__name__}. Give it a Trainer of trainwright, "
            'made likewise; with reproduce="transformers" it computes what the one of transformers does.'
        )
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("one", "other")]
        for one, place in zip((trainer, other), folders, strict=True):
            with quietly(one):
                record_steps(one, place, num_steps=num_steps)
        return compare_values(*map(read_values, folders), tolerance=tolerance)


def record_steps(trainer: AnyTrainer, folder: Path, *, num_steps: int) -> AnyTrainer:
    """Trains the first steps of a copy of the trainer, records their values in a folder, and returns the copy."""
    copied = short_copy(trainer, str(folder))
    copied.callback_handler.add_callback(EndAfter(num_steps))
    copied.args.record_values = num_steps
    copied.train()
    return copied


class EndAfter(TrainerCallback):
    """Ends a run early: with a smaller `max_steps`, its rates would be others."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step >= self._num_steps:
            control.should_training_stop = True
