"""Random states of this process: copied and restored by each library's public functions, and their files.

A copy holds the return values of these functions; `plain` converts it to numbers and tensors, which load without
unpickling anything else, and is only called for writing files. A copy takes about 50 us on a CPU, 35 of them for
numpy's generator and 12 for python's, so a step makes as few as possible:

- Before a fetch of data that may draw random numbers in this process (`data/loader.py`): a checkpoint after the step,
  or a signal during the fetch, repeats the draws of that fetch. Data in memory, and workers, do not need this.
- At the beginning of a window with `save_on_exception` (`loop/fit.py`); if both are needed, one copy is made.
- Before the forward passes of a window (`loop/fit.py`), of torch's generators alone (`capture_torch`, about 1 us), for
  incident bundles. All generators are copied there only if the model was seen to use the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from trainwright._types import RNG_STATE_NAME, StateDict
from trainwright.distributed import device
from trainwright.errors import CheckpointError

States: TypeAlias = dict[str, Any]  # generator -> its state, each of its own type
# Field of a loader's state -> its name in the file, which has the states of the generators too.
LOADER_STATES = {
    "epoch_start": "loader_epoch_start",
    "before_ahead": "loader_before_ahead",
    "before_given": "loader_before_given",
}


def capture() -> States:
    """Returns the states of python's, numpy's and torch's generators, for `restore` and `plain`."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), **capture_torch()}


def capture_torch() -> States:
    """Returns the states of torch's generators alone: of the CPU and of devices."""
    return {"cpu": torch.get_rng_state(), **device.random_states()}


def restore(states: States) -> None:
    """Restores the states from `capture` or from a file; states of devices missing on this machine are ignored."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    device.set_random_states(states)


def plain(states: Any) -> Any:
    """Returns states with numbers, strings and lists in place of numpy's arrays, in the form that transformers reads.

    A loader's states are stored with the generators' states, under their own names; None stays None.
    """
    if not isinstance(states, dict):
        return states
    return {name: _plain_numpy(one) if name == "numpy" else plain(one) for name, one in states.items()}


def _plain_numpy(state: Any) -> Any:
    if not isinstance(state, dict) or state["bit_generator"] != "MT19937":
        return _without_arrays(state)
    words = state["state"]["key"]
    position = state["state"]["pos"]
    return "MT19937", _without_arrays(words), int(position), int(state["has_gauss"]), float(state["gauss"])


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_arrays(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_without_arrays, value))
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def same(one: States, other: States) -> bool:
    """Returns True if two captured states yield the same numbers from now on."""
    return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


@contextmanager
def unchanged_random_states() -> Iterator[States]:
    """Restores the random states afterwards, so that evaluating never changes training; yields them."""
    states = capture()
    try:
        yield states
    finally:
        restore(states)


def file_name(rank: int, num_processes: int, name: str = RNG_STATE_NAME) -> str:
    """Returns the name of a process's file in a checkpoint, for its random states or another kind given by `name`."""
    stem, dot, ending = name.partition(".")
    return name if num_processes == 1 else f"{stem}_{rank}{dot}{ending}"


def find_file(folder: str | Path, *, rank: int, num_processes: int, name: str = RNG_STATE_NAME) -> Path | None:
    """Returns the path of a process's file, if any; the first process accepts it for another number of processes."""
    path = Path(folder) / file_name(rank, num_processes, name)
    if path.is_file():
        return path
    return find_first_file(folder, name) if rank == 0 else None


def find_first_file(folder: str | Path, name: str = RNG_STATE_NAME) -> Path | None:
    """Returns the path of the first process's file, for any number of processes, or None."""
    paths = [Path(folder) / file_name(0, num_processes, name) for num_processes in (1, 2)]
    return next((path for path in paths if path.is_file()), None)


def save(path: Path, states: States) -> None:
    """Writes states to a file, as plain numbers and tensors."""
    torch.save(plain(states), path)


def read(path: Path) -> StateDict:
    """Reads a file of plain values, numbers of numpy included; CheckpointError for others."""
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            states = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(states, dict):
            raise TypeError(f"a {type(states).__name__}")
        return states
    except Exception as error:  # whatever the reader raises, these are not plain states
        raise CheckpointError(f"{path} cannot be read as plain random states: {error}") from error


def load(path: Path) -> States:
    """Reads a file of `save` or of transformers; CheckpointError if a generator would refuse its states."""
    states = read(path)
    try:
        _try(states)
        for name in LOADER_STATES.values():
            if states.get(name) is not None:
                _try(states[name])
    except Exception as error:  # whatever a generator raises
        raise CheckpointError(f"{path} has random states that cannot be set: {error!r}.") from error
    return states


def _try(states: States) -> None:
    """Gives states to generators of their own; whatever they raise, the states are not those of a run."""
    random.Random().setstate(states["python"])
    if np.random.get_state(legacy=False)["bit_generator"] == "MT19937":  # users may set another
        np.random.RandomState().set_state(states["numpy"])
    torch.Generator().set_state(states["cpu"])
    kind = device.accelerator()
    of_devices = states.get(kind) if kind is not None else None
    for one in of_devices if isinstance(of_devices, list) else [of_devices]:
        if one is not None and not (isinstance(one, torch.Tensor) and one.dtype == torch.uint8):
            raise TypeError(f"the state of a {kind} device is a {type(one).__name__}")


def numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:  # as declared by torch
    """Returns the globals that an array of numpy needs for torch's weights-only loading."""
    make_array: Any = np.empty(0).__reduce__()[0]  # the function named in a pickled array
    return [make_array, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
