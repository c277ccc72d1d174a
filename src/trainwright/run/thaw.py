"""A trainer that evaluates in this process for a run in another one, from the file that `frozen.py` writes.

`python -m trainwright.run.thaw MODULE:FUNCTION FILE PID` is the process of a capability: it calls the function with
`thaw`, FILE and PID.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainwright.capability_table import load
from trainwright.distributed.device import tf32_switches
from trainwright.errors import ArgumentError
from trainwright.run import build, train
from trainwright.run.internals import Internals
from trainwright.run.pickling import restore
from trainwright.state.trainer_state import TrainerControl

AnyTrainer = Any  # a Trainer, or a subclass of the user's: the class is above this package


@contextmanager
def thaw(path: Path, *, device_argument: str) -> Iterator[tuple[AnyTrainer, str]]:
    """Reads a file of `frozen.freeze`; within the context, the trainer evaluates as the run does while it trains.

    Args:
        path: the file.
        device_argument: the argument with the device, as messages name it.

    Yields:
        The trainer, and the directory in which the run writes.

    Raises:
        ArgumentError: this process does not find the device.
    """
    # Written by the parent process into a directory that only this user can write to.
    values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    torch.set_num_threads(values["threads"])
    torch.set_float32_matmul_precision(values["matmul_precision"])
    torch.set_default_dtype(values["dtype"])
    state: dict[str, Any] = values["trainer"]
    trainer = object.__new__(values["class"])
    restore(trainer, state | {"control": TrainerControl()})
    build.seed_everything(trainer.args)
    torch.use_deterministic_algorithms(values["is_deterministic"])
    for (owner, name), value in zip(tf32_switches(), values["tf32"], strict=True):
        setattr(owner, name, value)
    internals = Internals(trainer)
    wanted = values["device"]
    found = internals.engine.device
    if found.type != wanted.partition(":")[0]:
        raise ArgumentError(
            f"{device_argument}={wanted!r} is not there: the process that evaluates finds {str(found)!r}."
        )
    internals.adopt_model(trainer.model)
    internals.run.is_training = True  # evaluations within a training compute in its precision
    with train.patched_model(trainer):
        yield trainer, values["folder"]


if __name__ == "__main__":
    load(sys.argv[1])(thaw, Path(sys.argv[2]), int(sys.argv[3]))
