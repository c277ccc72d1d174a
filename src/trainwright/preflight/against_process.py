"""One side of `Trainer.check(against=...)`: trains the trainer in a file with the packages of this process.

`python -m trainwright.preflight.against_process FOLDER SIDE STEPS` reads FOLDER/trainer.pt, which its parent has
written, and records the values of its first steps and of its predictions in FOLDER/SIDE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from trainwright._types import JSONObject, has_length, json_value
from trainwright.capabilities.recorded_values.fingerprint import fingerprint
from trainwright.capabilities.recorded_values.value_comparison import values_file
from trainwright.checkpoint.rng import unchanged_random_states
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


def add_predictions(folder: str | Path, step: int, predictions: Any, labels: Any, metrics: JSONObject | None) -> None:
    """Adds the predictions after a step to the record of the first process.

    Args:
        folder: the run's directory.
        step: the last recorded step.
        predictions: arrays, nested; a part that is no array is recorded by its class.
        labels: likewise.
        metrics: names and numbers; times and rates are left out.
    """
    values = {
        f"{title}{'.' if name else ''}{name}": fingerprint(torch.as_tensor(one))
        for title, tree in (("predictions", predictions), ("labels", labels))
        for name, one in _named_arrays(tree)
    }
    facts = {name: one for name, one in (metrics or {}).items() if not name.endswith(("_runtime", "_per_second"))}
    line = {"step": step, "micro_batch": 0, "phase": "prediction", "name": "", "values": values, "facts": facts}
    with values_file(folder, 0).open("a", encoding="utf-8") as file:
        file.write(json.dumps(json_value(line)) + "\n")


def _named_arrays(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a nested value; an array of objects is yielded as a zero, by the names of its classes."""
    if isinstance(tree, (list, tuple)):
        for number, one in enumerate(tree):
            yield from _named_arrays(one, f"{name}.{number}" if name else str(number))
    elif isinstance(tree, np.ndarray) and tree.dtype != object:
        yield name, tree
    elif tree is not None:
        kinds = sorted({type(one).__name__ for one in np.atleast_1d(tree)})
        yield f"{name} ({', '.join(kinds)})".strip(), np.zeros(1)


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
