"""Checkpoint: a directory that is opened once; its parts are read by name.

Manifest, record, arguments and random states are cached when first read. Verification keeps the content of the small
files that a resume reads afterwards, so each is opened only once, and exactly the verified content is loaded. Weights
and states of optimizers are read at each call and never cached.

`store.py` finds checkpoints and commits new ones, `entries.py` names the files of extensions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainwright._types import (
    EXTENSIONS_NAME,
    MANIFEST_NAME,
    RNG_STATE_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_JSON_NAME,
    JSONObject,
    StateDict,
    UnmatchedKeys,
)
from trainwright.checkpoint import rng, training_state
from trainwright.checkpoint.entries import FILES, MAX_JSON_BYTES, Entry, name_entry_file
from trainwright.checkpoint.manifest import Manifest, digest, digest_content, list_problems
from trainwright.errors import CheckpointError
from trainwright.state import trainer_state
from trainwright.state.trainer_state import TrainerState
from trainwright.support.door import MALFORMED, parse_json, read_bytes

if TYPE_CHECKING:
    from trainwright.checkpoint.weights import ShardedReader

MAX_ARGUMENT_BYTES = 64 << 20  # for the file of arguments
# Files whose content is kept from verification until it is read, and their maximum size.
KEPT = {
    TRAINER_STATE_NAME: trainer_state.MAX_BYTES,
    TRAINING_ARGS_JSON_NAME: MAX_ARGUMENT_BYTES,
    **{name: MAX_JSON_BYTES for name in FILES.values() if name.endswith(".json")},
}


class Checkpoint:
    """A directory with a checkpoint, of this package or of transformers.

    Opening reads nothing. Missing or damaged parts raise a CheckpointError with the file's name when they are read;
    `find_problem` reads all files.

    Args:
        path: the directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._contents: dict[str, bytes] = {}  # files that were verified and not read since
        self._random_states: dict[Path, rng.States] = {}

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    # -- description ---------------------------------------------------------------------------------------------------

    @cached_property
    def manifest(self) -> Manifest | None:
        """Its list of files; None if it is damaged, or missing, as in a checkpoint of transformers."""
        return Manifest.read(self.path)

    @property
    def cursor(self) -> JSONObject | None:
        """Position in the data, as `data.cursor.Cursor` stores it; None without a manifest, or without a dataset."""
        return None if self.manifest is None else self.manifest.cursor

    @property
    def non_finite_mark(self) -> str | None:
        """Describes the values marked as not finite; None if there are none."""
        return None if self.manifest is None else self.manifest.non_finite_mark

    @property
    def identity(self) -> str | int | None:
        """A value that is equal in all processes that see the same checkpoint; None if they see none."""
        if self.manifest is not None:
            return self.manifest.identity
        if not (self.path / TRAINER_STATE_NAME).is_file():
            return None
        _, checksum = self._record
        return checksum

    @property
    def state(self) -> TrainerState:
        """The record of the run, shared by all callers: copy it before changing it.

        Raises CheckpointError if it is missing or cannot be read.
        """
        state, _ = self._record
        return state

    @cached_property
    def _record(self) -> tuple[TrainerState, int]:
        """The record, and the checksum of its file."""
        path = self.path / TRAINER_STATE_NAME
        if not path.is_file():
            raise CheckpointError(f"{self.path} has no {TRAINER_STATE_NAME}, so its step is unknown.")
        try:
            content = self._read(path)
            state = TrainerState.from_json(content)
            if self.manifest is not None and state.global_step != self.manifest.step:
                raise ValueError(f"its step is {state.global_step}, and that of {MANIFEST_NAME} {self.manifest.step}")
            return state, zlib.crc32(content)
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error

    @cached_property
    def arguments(self) -> JSONObject | None:
        """The arguments of its training by name; None if they are missing or cannot be read."""
        try:
            found = parse_json(self._read(self.path / TRAINING_ARGS_JSON_NAME))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    # -- verification --------------------------------------------------------------------------------------------------

    def find_problem(self) -> str | None:
        """Reads all files; returns the first problem, or None if they match the manifest."""
        return next(self.problems(), None)

    def problems(self) -> Iterator[str]:
        """Yields all problems of the files. A checkpoint without a manifest is accepted if it has a record."""
        yield from list_problems(self.path, self.manifest, compute_digest=self._compute_digest)

    def check_readable(self) -> None:
        """Raises CheckpointError for the first unreadable file of states or weights; tensor data is not read."""
        first = rng.find_first_file(self.path)
        for path in sorted(self.path.iterdir()):
            if path == first:
                self._states_in(path)
            elif path.suffix == ".pth":
                rng.read(path)
            elif path.suffix in (".pt", ".safetensors"):
                training_state.check_readable(path)

    # -- contents ------------------------------------------------------------------------------------------------------

    def random_states(self, rank: int, num_processes: int = 1) -> rng.States | None:
        """Returns the random states of a process, or None if it has none in this checkpoint.

        If another number of processes wrote the checkpoint, the first process uses the states of the first.
        """
        path = rng.find_file(self.path, rank=rank, num_processes=num_processes)
        return None if path is None else self._states_in(path)

    def first_random_states(self) -> rng.States | None:
        """Returns the random states of the first process, or None if there are none."""
        path = rng.find_first_file(self.path)
        return None if path is None else self._states_in(path)

    def restore_random_states(self, rank: int, num_processes: int = 1) -> bool:
        """Restores the random states of a process, without caching any; returns False if it has none here."""
        path = rng.find_file(self.path, rank=rank, num_processes=num_processes)
        if path is None:
            return False
        states = self._states_in(path)
        self._random_states.clear()
        try:
            rng.restore(states)
        except MALFORMED as error:
            raise CheckpointError(f"{path} has random states that cannot be set: {error!r}.") from error
        return True

    def has_random_states(self, rank: int, num_processes: int) -> bool:
        """Returns whether this process, of this number of processes, wrote its random states."""
        return (self.path / rng.file_name(rank, num_processes, RNG_STATE_NAME)).is_file()

    def data_position(self, rank: int, num_processes: int = 1) -> StateDict:
        """Returns the position of a stream or of a user's dataloader, depending on its kind.

        A process that wrote none uses the first one's if that is a stream: all processes read the same items.
        Version 0.1 kept the position among the random states.
        """
        entry = self.entry("data_position", rank=rank, num_processes=num_processes)
        if entry.path is not None:
            position = training_state.load_data_position(entry.path)
            return position if entry.is_own else {kind: one for kind, one in position.items() if kind == "stream"}
        own = self.random_states(rank, num_processes) or {}
        states = own or self.first_random_states() or {}
        found = {"stream": states.get("loader_stream"), "dataloader": own.get("loader_own")}
        return {kind: position for kind, position in found.items() if position}

    def entry(self, name: str, *, rank: int = 0, num_processes: int = 1) -> Entry:
        """Returns the saved state of an extension by its name.

        `rank` of `num_processes` is the process that asks, for an entry that each process writes; a process without its
        own file uses that of the first process.
        """
        path, is_own = self._find(name_entry_file(name), rank, num_processes)
        return Entry(name, path, is_own=is_own, read=self._read)

    def count_skipped_steps(self) -> int:
        """Returns the number of steps without an update, as far as the extensions of its run counted them."""
        entries = [self.entry(name) for name, file in FILES.items() if file.endswith(".json")]
        states = [replace(one, read=self._read_again).state() for one in entries]
        counts = [state.get("skipped_steps") for state in states]
        return sum(count for count in counts if type(count) is int)

    def extension_states(self, rank: int, num_processes: int = 1) -> dict[str, StateDict]:
        """Returns the states of all extensions without their own files, by name; the process is that of `entry`."""
        path, _ = self._find(EXTENSIONS_NAME, rank, num_processes)
        states = {} if path is None else training_state.load_plain(path)
        if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
            raise CheckpointError(f"{path} holds no states of extensions. Use another checkpoint, or delete the file.")
        return states

    def load_weights(
        self,
        model: nn.Module,
        *,
        shards: ShardedReader,
        load: Callable[[nn.Module, Mapping[str, torch.Tensor]], UnmatchedKeys],
    ) -> UnmatchedKeys:
        """Loads the weights into a model, in place; returns the names that did not match.

        `shards` reads weights that processes wrote in parts, `load` puts weights into the model. Raises CheckpointError
        if there are none, or they do not fit.
        """
        from trainwright.checkpoint import weights

        found = shards.read_weights(self.path) if shards.has_weights(self.path) else None
        return weights.load_weights(model, self.path, found=found, load=load)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _find(self, name: str, rank: int, num_processes: int) -> tuple[Path | None, bool]:
        """Returns the file of a process, or of the first one, and whether it belongs to the process."""
        own = rng.find_file(self.path, rank=rank, num_processes=num_processes, name=name)
        return own or rng.find_first_file(self.path, name), own is not None

    def _states_in(self, path: Path) -> rng.States:
        if path not in self._random_states:
            self._random_states[path] = rng.load(path)
        return self._random_states[path]

    def _read(self, path: Path) -> bytes:
        """Returns the content of a small file; the verified content, if it was not read since."""
        content = self._contents.pop(path.name, None)
        return read_bytes(path, max_bytes=KEPT.get(path.name, MAX_JSON_BYTES)) if content is None else content

    def _read_again(self, path: Path) -> bytes:
        """Returns the content of a small file, and keeps it for the next reader."""
        self._contents[path.name] = content = self._read(path)
        return content

    def _compute_digest(self, path: Path, kind: str) -> str:
        """Returns the checksum of a file, and keeps the content of a small one."""
        if path.parent != self.path or path.name not in KEPT:
            return digest(path, kind)
        try:
            content = read_bytes(path, max_bytes=KEPT[path.name])
        except ValueError:  # larger than any reader accepts
            return digest(path, kind)
        self._contents[path.name] = content
        return digest_content(content, kind)
