"""One side of `Trainer.check(against=...)`: trains the trainer in a file with the packages of this process.

`python -m trainwright.preflight.against_process FOLDER SIDE STEPS` reads FOLDER/trainer.pt, which its parent has
written, and records the values of its first steps and of its predictions in FOLDER/SIDE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from trainwright._types import has_length
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.extensions.recorded_values.extension import add_predictions
from trainwright.preflight.against import TRAINER_FILE
from trainwright.preflight.compare_values import record_steps
from trainwright.run.pickling import restore
from trainwright.state.trainer_state import TrainerControl

NUM_PREDICTED = 48


def read_trainer(path: Path) -> Any:
    """Returns the trainer in the file; it was written by the parent process into a directory of this user alone."""
    values: dict[str, Any] = torch.load(path, weights_only=False)
    torch.set_num_threads(values["threads"])
    trainer = object.__new__(values["class"])
    restore(trainer, values["trainer"] | {"control": TrainerControl()})
    return trainer


def predict_first(trainer: Any) -> Any:
    """Returns the output of `predict` for the first evaluation samples; None without any that have a length."""
    data = trainer.eval_dataset
    if isinstance(data, dict):
        data = next(iter(data.values()), None)
    if data is None or not has_length(data):
        return None
    indices = range(min(len(data), NUM_PREDICTED))
    first = data.select(indices) if hasattr(data, "select") else Subset(data, indices)
    with unchanged_random_states():
        return trainer.predict(first)


def main() -> None:
    """Trains, predicts and records."""
    folder = Path(sys.argv[1])
    place = folder / sys.argv[2]
    num_steps = int(sys.argv[3])
    trained = record_steps(read_trainer(folder / TRAINER_FILE), place, num_steps=num_steps)
    output = predict_first(trained)
    if output is not None:
        add_predictions(place, trained.state.global_step, output.predictions, output.label_ids, output.metrics)


if __name__ == "__main__":
    main()
