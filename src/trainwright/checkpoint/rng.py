"""Random states of this process, as plain numbers and tensors that load without unpickling anything else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from trainwright._types import RNG_STATE_NAME
from trainwright.errors import CheckpointError

States: TypeAlias = dict[str, Any]  # generator -> its state, each of its own type
NumpyState: TypeAlias = "tuple[str, np.ndarray[Any, Any], int, int, float]"


def capture() -> States:
    """Returns the states of python's, numpy's and torch's generators, in the form that transformers reads too."""
    kind, keys, position, has_gauss, cached = cast(NumpyState, np.random.get_state(legacy=True))
    states: States = {
        "python": random.getstate(),
        "numpy": (str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        drives_all = torch.cuda.device_count() > 1 and not torch.distributed.is_initialized()
        states["cuda"] = torch.cuda.get_rng_state_all() if drives_all else torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore(states: States) -> None:
    """Sets the states of `capture`; those of devices that this machine lacks are left out."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        state = states["cuda"]
        if not isinstance(state, list):
            torch.cuda.set_rng_state(state)
        else:
            torch.cuda.set_rng_state_all(state[: torch.cuda.device_count()])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def unchanged_random_states() -> Iterator[None]:
    """Whatever draws random numbers inside leaves the states as they were, so evaluating never changes training."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


def file_name(rank: int, num_processes: int, name: str = RNG_STATE_NAME) -> str:
    """Returns the name of a process's file in a checkpoint: of its random states, or of what else `name` says."""
    stem, dot, ending = name.partition(".")
    return name if num_processes == 1 else f"{stem}_{rank}{dot}{ending}"


def find_file(folder: str | Path, *, rank: int, num_processes: int, name: str = RNG_STATE_NAME) -> Path | None:
    """Returns the path of a process's file, if any; the first process takes that of other numbers of processes."""
    path = Path(folder) / file_name(rank, num_processes, name)
    if path.is_file():
        return path
    return find_first_file(folder, name) if rank == 0 else None


def find_first_file(folder: str | Path, name: str = RNG_STATE_NAME) -> Path | None:
    """Returns the path of the first process's file, whether one process wrote the checkpoint or several, or None."""
    paths = [Path(folder) / file_name(0, num_processes, name) for num_processes in (1, 2)]
    return next((path for path in paths if path.is_file()), None)


def save(path: Path, states: States) -> None:
    """Writes states to a file."""
    torch.save(states, path)


def load(path: Path) -> States:
    """Reads a file of `save`, or of transformers (whose numpy state is an array); others raise CheckpointError."""
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            states = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(states, dict):
            raise TypeError(f"a {type(states).__name__}")
        return states
    except Exception as error:  # whatever the reader raises, these are no plain states
        raise CheckpointError(f"{path} cannot be read as plain random states: {error}") from error


def numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:  # as torch declares it
    """Returns what an array of numpy needs to load under torch's weights-only loading."""
    core: Any = np._core if hasattr(np, "_core") else np.core
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
