"""Random states of this process, as plain numbers and tensors that load without unpickling anything else.

A step may have to note the states of before it, which nearly always nobody reads. `snapshot` copies the memory of
python's and numpy's generators: their own functions make 1,249 numbers of it, which takes 50 times as long.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from trainwright._types import RNG_STATE_NAME
from trainwright.errors import CheckpointError

States: TypeAlias = dict[str, Any]  # generator -> its state, each of its own type
NumpyState: TypeAlias = "tuple[str, np.ndarray[Any, Any], int, int, float]"


WORDS, GAUSS = 624, struct.Struct("=i4xd")  # of a Mersenne Twister; whether numpy keeps a normal number, and which
TwisterMemory = ctypes.c_char * (4 * (WORDS + 1))  # its words, and how many of them are given out


class Snapshot(NamedTuple):
    """States as they lie in memory; `plain` makes those of `capture` of them."""

    python: bytes
    gauss_next: float | None
    numpy: bytes
    gauss: bytes
    others: States


class GeneratorMemory:
    """Memory of python's and numpy's generators; a LookupError where its layout is not the known one."""

    def __init__(self) -> None:
        self._python = random.random.__self__  # type: ignore[attr-defined]  # a method of the generator
        words = np.array(random.getstate()[1], dtype=np.uint32)
        place = id(self._python) + _find(self._python, words[WORDS:].tobytes() + words[:WORDS].tobytes())
        self._python_words = TwisterMemory.from_address(place)
        drawn = np.random.RandomState(0)
        drawn.standard_normal()
        _, _, _, has_gauss, gauss = cast(NumpyState, drawn.get_state(legacy=True))
        self._numpy = _bit_generator()
        self._numpy_words = TwisterMemory.from_address(self._numpy.ctypes.state_address)
        owner = np.random.random.__self__  # type: ignore[attr-defined]
        place = id(owner) + _find(drawn, GAUSS.pack(has_gauss, gauss))
        self._gauss = (ctypes.c_char * GAUSS.size).from_address(place)
        self._device_states = _device_states if _device_states() else dict
        seen, known = plain(self.copy()), capture()
        if any(seen[name] != known[name] for name in ("python", "numpy")):
            raise LookupError

    def copy(self) -> Snapshot | States:
        """Returns the states of now."""
        if _bit_generator() is not self._numpy:
            return capture()
        others = self._device_states()
        others["cpu"] = torch.default_generator.get_state()
        gauss_next = self._python.gauss_next
        return Snapshot(self._python_words.raw, gauss_next, self._numpy_words.raw, self._gauss.raw, others)


def _bit_generator() -> Any:  # its type is not in numpy's stubs
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _find(owner: object, content: bytes) -> int:
    place = ctypes.string_at(id(owner), type(owner).__basicsize__).find(content)
    if place < 0:
        raise LookupError
    return place


@functools.cache
def _memory() -> GeneratorMemory | None:
    try:
        return GeneratorMemory()
    except LookupError:
        return None


def snapshot() -> Snapshot | States:
    """Returns the states of now for `restore` and `plain`, copied as fast as it goes."""
    memory = _memory()
    return capture() if memory is None else memory.copy()


def plain(states: Any) -> Any:
    """Returns the states of a snapshot as `capture` returns them; others, and None, as they are."""
    if not isinstance(states, Snapshot):
        return states
    given, *words = np.frombuffer(states.python, np.uint32).tolist()
    *keys, position = np.frombuffer(states.numpy, np.uint32).tolist()
    has_gauss, gauss = GAUSS.unpack(states.gauss)
    python = (random.Random.VERSION, (*words, given), states.gauss_next)
    return {"python": python, "numpy": ("MT19937", keys, position, has_gauss, gauss), **states.others}


def capture() -> States:
    """Returns the states of python's, numpy's and torch's generators, in the form that transformers reads too."""
    kind, keys, position, has_gauss, cached = cast(NumpyState, np.random.get_state(legacy=True))
    states: States = {
        "python": random.getstate(),
        "numpy": (str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)),
        "cpu": torch.get_rng_state(),
    }
    return states | _device_states()


def _device_states() -> States:
    states: States = {}
    if torch.cuda.is_available():
        drives_all = torch.cuda.device_count() > 1 and not torch.distributed.is_initialized()
        states["cuda"] = torch.cuda.get_rng_state_all() if drives_all else torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore(states: Snapshot | States) -> None:
    """Sets the states of `capture` or `snapshot`; those of devices that this machine lacks are left out."""
    known: States = plain(states)
    random.setstate(known["python"])
    np.random.set_state(known["numpy"])
    torch.set_rng_state(known["cpu"])
    if "cuda" in known and torch.cuda.is_available():
        state = known["cuda"]
        if not isinstance(state, list):
            torch.cuda.set_rng_state(state)
        else:
            torch.cuda.set_rng_state_all(state[: torch.cuda.device_count()])
    if "mps" in known and torch.backends.mps.is_available():
        torch.mps.set_rng_state(known["mps"])


@contextmanager
def unchanged_random_states() -> Iterator[None]:
    """Whatever draws random numbers inside leaves the states as they were, so evaluating never changes training."""
    states = snapshot()
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
