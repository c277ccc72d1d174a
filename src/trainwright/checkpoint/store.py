"""Directories of checkpoints: staged, committed by rename, listed, deleted; which old ones may be deleted.

A checkpoint either exists completely or not at all: files are written into a staging directory next to the final one,
flushed to disk and listed in a manifest, and the directory is renamed. A reader never sees a half-written checkpoint
under its final name.

Only checkpoints of this run are ever deleted, but never the newest (nor later steps, which a run that went back will
write again) and never the best. Of the others, the last ones up to the limit are kept, and beyond it one per number of
steps and one per length of time, as set in `Keep`.

Before a commit, the newly written weights are checked while they are still cached: NaN and infinity are marked or
refused. Buffers are not checked: masks and observed ranges begin with infinities.
"""

from __future__ import annotations

import filecmp
import logging
import os
import pickle
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainwright._types import PREFIX_CHECKPOINT_DIR, replacing
from trainwright.checkpoint.changes import ChangeWatch
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import (
    DIGEST,
    FileEntry,
    Manifest,
    describe_files,
    files_below,
    flush_path,
    links_that_leave,
)
from trainwright.errors import CheckpointError, CheckpointNotFoundError, NonFiniteWeightsError
from trainwright.support.door import MALFORMED, parse_json
from trainwright.support.host import is_process_alive

logger = logging.getLogger(__name__)

_FINAL = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_BESIDE = re.compile(
    rf"^\.{PREFIX_CHECKPOINT_DIR}-(?P<step>\d+)\.(?P<host>.+)\.(?P<pid>\d+)(\.t[0-9a-f]+)?\."
    r"(?P<purpose>staging|replaced|removed)$"
)

MIN_BYTES = 1 << 20  # smaller files save little, and people edit them in place
PIECE = 1 << 18  # elements compared at once, so that they stay in the cache
MAX_HEADER = 100_000_000  # bytes of a safetensors file, as that library has it
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
NOT_WEIGHTS = ("optimizer", "rng_state")  # prefixes of names
_IN_USE: set[Path] = set()  # staging directories being written by this process, possibly in the background


Pieces = Callable[[Path], Iterable[tuple[str, str, torch.Tensor]]]  # directory -> (file, name of tensor, values)


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Rule for the weights of a checkpoint."""

    # non-finite weights are refused if a good checkpoint exists; otherwise only marked
    is_strict: bool = False
    refuses_first: bool = False  # they are refused even if no good checkpoint exists
    buffers: frozenset[str] = frozenset()  # names of tensors that are not weights
    shards: Pieces = lambda folder: ()  # reads the weights of a sharded checkpoint, piece by piece
    # returns a file besides the weights, and a value in it, for which a checkpoint is only marked
    find_beside: Callable[[Path], tuple[str, str] | None] = lambda folder: None

    def find(self, folder: Path) -> tuple[str, str] | None:
        """Returns the first file below a directory with a non-finite tensor, and the tensor; None if all are finite.

        Args:
            folder: directory with weights as safetensors, in torch's files, or sharded; other files are not read.
        """
        for path in sorted(path for pattern in WEIGHTS for path in folder.rglob(pattern)):
            name = self.first_in(path)
            if name is not None:
                return path.relative_to(folder).as_posix(), name
        shards = self.shards(folder)
        return next(((at, name) for at, name, one in shards if name not in self.buffers and not _is_finite(one)), None)

    def first_in(self, path: Path) -> str | None:
        """Returns the first non-finite tensor of a weight file; None for all other files, which are not read."""
        if path.name.startswith(NOT_WEIGHTS) or not any(path.match(pattern) for pattern in WEIGHTS):
            return None
        try:
            if path.suffix == ".safetensors":
                return _first_in_safetensors(path, self.buffers)
            named = torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()
            return next((name for name, one in named if name not in self.buffers and not _is_finite(one)), None)
        except (pickle.UnpicklingError, OSError, *MALFORMED):
            return None  # the user's own file of that name, or no room to map one of torch


@dataclass(frozen=True, slots=True, order=True)
class _Values:
    """Where the values of a tensor are in the data of a safetensors file, in bytes."""

    start: int
    end: int
    name: str
    dtype: str


def _first_in_safetensors(path: Path, buffers: frozenset[str]) -> str | None:
    """Returns the first non-finite tensor of a file, which may have thousands of small ones.

    Neighbours of one type are compared together, through one buffer: there may be no room to map the whole file.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER:
            raise ValueError(f"its header has {header_bytes} bytes")
        header = parse_json(file.read(header_bytes))
        tensors = sorted(
            _Values(about["data_offsets"][0], about["data_offsets"][1], name, about["dtype"])
            for name, about in header.items()
            if name != "__metadata__" and name not in buffers and about["dtype"] in FLOATS
        )
        for neighbours in _neighbours(tensors):
            dtype = FLOATS[neighbours[0].dtype]
            place = neighbours[0].start
            left = neighbours[-1].end - place
            file.seek(8 + header_bytes + place)
            buffer = bytearray(min(left, PIECE * dtype.itemsize))
            while left > 0:
                size = file.readinto(memoryview(buffer)[: min(left, len(buffer))])
                values = torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize)
                if not _is_finite(values):
                    first = place + int(torch.isfinite(values).logical_not().nonzero()[0]) * dtype.itemsize
                    return next(one.name for one in neighbours if one.start <= first < one.end)
                place += size
                left -= size
    return None


def _neighbours(tensors: Iterable[_Values]) -> Iterator[list[_Values]]:
    """Yields tensors of one type that follow each other without a gap."""
    found: list[_Values] = []
    for one in tensors:
        if found and (one.start, one.dtype) != (found[-1].end, found[-1].dtype):
            yield found
            found = []
        found.append(one)
    if found:
        yield found


def _is_finite(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    flat = tensor.reshape(-1)
    pieces = (flat[start : start + PIECE] for start in range(0, len(flat), PIECE))
    return all(bool(torch.isfinite(torch.stack(torch.aminmax(piece))).all()) for piece in pieces)


ANY_WEIGHTS = WeightCheck()


class CheckpointStore:
    """Store of the checkpoints below one output directory."""

    def __init__(self, root: str | Path, *, weights: WeightCheck = ANY_WEIGHTS) -> None:
        self.root = Path(root)  # the directory
        self._weights = weights  # rule for the weights of committed checkpoints
        self._token = f"t{uuid.uuid4().hex[:8]}"  # separates the directories of several stores in this process
        self.watch: ChangeWatch | None = None  # informed of each committed checkpoint, if user code sees it

    def path(self, step: int) -> Path:
        return self.root / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints on disk, oldest first."""
        return sorted(step for step, _ in _finals(self.root))

    def owned_by(self, run_id: str) -> set[int]:
        """Returns the steps of the checkpoints that a run wrote."""
        manifests = {step: Manifest.read(path) for step, path in _finals(self.root)}
        return {step for step, manifest in manifests.items() if manifest is not None and manifest.run_id == run_id}

    def non_finite(self) -> set[int]:
        """Returns the steps of the checkpoints with weights marked as not finite."""
        return {step for step, path in _finals(self.root) if Checkpoint(path).non_finite_mark is not None}

    def watch_for_changes(self, run_id: str) -> ChangeWatch:
        """Returns a watch over the checkpoints of a run: existing ones, and all that are committed from now on."""
        self.watch = ChangeWatch(self._weights.first_in)
        for _, path in _finals(self.root):
            manifest = Manifest.read(path)
            if manifest is not None and manifest.run_id == run_id:
                self.watch.add(path, manifest)
        return self.watch

    def stage(self, step: int) -> Path:
        """Creates an empty directory to write a checkpoint into."""
        staging = self._beside(step, "staging")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _IN_USE.add(staging.absolute())
        return staging

    def commit(self, staging: Path, manifest: Manifest) -> Path:
        """Flushes, lists and renames a staged checkpoint; returns its final path.

        Files that were written under the final name meanwhile are kept, unless the checkpoint has them too. Large files
        that are unchanged since this run's previous checkpoint share its disk space. Non-finite weights, and other such
        values, are marked in the manifest, which is given without its files; if the check is strict and the run has a
        checkpoint to fall back to, such weights raise NonFiniteWeightsError.
        """
        final = self.path(manifest.step)
        if final.exists() and Manifest.read(final) is None:
            _merge(final, staging)
        files = describe_files(staging)
        if (bad := self._weights.find(staging)) is not None:
            name, tensor = bad
            good = max(self.owned_by(manifest.run_id) - self.non_finite(), default=None)
            if self._weights.is_strict and (good is not None or self._weights.refuses_first):
                newest = f"{self.path(good)} is the newest" if good is not None else "There is no"
                raise NonFiniteWeightsError(
                    f"Checkpoint {final} is not written: {tensor} in {name} is not finite. {newest} checkpoint with "
                    "finite weights. Lower the learning rate, or check the data of that step; "
                    "on_nonfinite='ignore' saves such checkpoints too."
                )
            files[name]["non_finite"] = tensor
        elif (marked := self._weights.find_beside(staging)) is not None:
            name, tensor = marked
            files[name]["non_finite"] = tensor
            logger.warning(
                "Checkpoint %s is marked: %s in %s is not finite, but the weights are. A resume uses an older "
                "checkpoint. Find the cause of such values; on_nonfinite='ignore' turns this check off.",
                final,
                tensor,
                name,
            )
        if (before := max(self.owned_by(manifest.run_id), default=None)) is not None:
            link_unchanged(staging, files, self.path(before))
        manifest = replace(manifest, files=files)
        manifest.write(staging)
        flush(staging)
        if self.watch is not None:
            self.watch.add(staging, manifest, final=final)
        return self.place(staging, manifest.step)

    def place(self, staging: Path, step: int) -> Path:
        """Renames a staged checkpoint, complete and flushed, to its final path, and returns that."""
        final = self.path(step)
        replaced = self._beside(step, "replaced")
        if os.path.lexists(final):
            _delete(replaced)
            _IN_USE.add(replaced.absolute())  # a reader in this process must not restore it meanwhile
            final.rename(replaced)
        staging.rename(final)
        _IN_USE.difference_update((staging.absolute(), replaced.absolute()))
        flush_path(self.root)
        _delete(replaced)
        return final

    def discard(self, staging: Path) -> None:
        _IN_USE.discard(staging.absolute())
        shutil.rmtree(staging, ignore_errors=True)

    def _beside(self, step: int, purpose: str) -> Path:
        owner = f"{socket.gethostname()}.{os.getpid()}.{self._token}"
        return self.root / f".{PREFIX_CHECKPOINT_DIR}-{step}.{owner}.{purpose}"

    def remove(self, step: int) -> None:
        logger.info("Deleting checkpoint %s (save_total_limit).", self.path(step))
        # Renamed first: if killed halfway, the rest must not pass for a checkpoint.
        going = self._beside(step, "removed")
        _delete(going)
        self.path(step).rename(going)
        _delete(going)

    def clean(self) -> None:
        """Removes incomplete checkpoints of dead processes on this machine; live processes' checkpoints stay."""
        self._finish_commits()
        for path, _ in self._left_over():
            _delete(path)

    def _finish_commits(self) -> None:
        """Completes commits of processes that died between the two renames of `commit`."""
        for purpose in ("staging", "replaced"):  # the new one if it is complete, else the old one
            for path, match in self._left_over():
                final = self.path(int(match["step"]))
                if match["purpose"] == purpose and not final.exists() and Manifest.read(path) is not None:
                    path.rename(final)

    def _left_over(self) -> list[tuple[Path, re.Match[str]]]:
        """Returns directories left next to the checkpoints by dead processes of this machine."""
        found = []
        here = socket.gethostname()
        own = os.getpid()
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _BESIDE.match(path.name)
            if match and match["host"] == here and path.absolute() not in _IN_USE:
                pid = int(match["pid"])
                if pid == own or not is_process_alive(pid):
                    found.append((path, match))
        return found

    def latest(self, why_not: Callable[[Checkpoint], str | None] = Checkpoint.find_problem) -> Checkpoint | None:
        """Returns the newest checkpoint without a problem; warns about newer checkpoints and names their problem."""
        self._finish_commits()
        for checkpoint in _newest_first(self.root):
            problem = checkpoint.non_finite_mark or why_not(checkpoint)
            if problem is None:
                return checkpoint
            logger.warning("Checkpoint %s is skipped: %s. Trying the one before it.", checkpoint, problem)
        return None


def verified(path: str | Path, *, argument: str = "resume_from_checkpoint") -> Checkpoint:
    """Opens a checkpoint named by the user in an argument; an error names the missing or altered file."""
    checkpoint = Checkpoint(path)
    folder = checkpoint.path
    if not folder.is_dir():
        there = [str(p) for _, p in sorted(_finals(folder.parent))]
        raise CheckpointNotFoundError(
            f"Can't find a valid checkpoint at {path} ({argument}): there is no such directory. "
            + (f"Next to it: {', '.join(there)}." if there else f"There is no checkpoint in {folder.parent} either.")
        )
    problem = checkpoint.find_problem()
    if problem is not None:
        or_newest = ", or pass True to use the newest complete one" if argument != "branch_from" else ""
        raise CheckpointError(
            f"Can't find a valid checkpoint at {path} ({argument}): {problem}. Name another checkpoint{or_newest}."
        )
    return checkpoint


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Returns the path of the newest complete checkpoint in a directory.

    Args:
        folder: the directory.

    Returns:
        The path; None if there is none.
    """
    latest = CheckpointStore(folder).latest()
    return None if latest is None else str(latest)


def _newest_first(root: Path) -> list[Checkpoint]:
    """Returns the checkpoints by the run that wrote last, then by step.

    In a directory with several runs, the highest step need not be the newest; within a run, times are ignored.
    """
    found = [(step, Checkpoint(path)) for step, path in _finals(root)]
    last: dict[str, float] = {}  # run -> time of its last checkpoint
    for _, checkpoint in found:
        manifest = checkpoint.manifest
        when = checkpoint.path.stat().st_mtime if manifest is None else manifest.written_at
        run = _read_run_id(checkpoint)
        last[run] = max(when, last.get(run, when))
    found.sort(key=lambda one: (last[_read_run_id(one[1])], one[0]), reverse=True)
    return [checkpoint for _, checkpoint in found]


def _read_run_id(checkpoint: Checkpoint) -> str:
    """Returns the run that wrote a checkpoint; empty if unknown."""
    return "" if checkpoint.manifest is None else checkpoint.manifest.run_id


def _finals(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir() if root.is_dir() else ():
        match = _FINAL.match(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def _delete(path: Path) -> None:
    """Deletes a directory as far as possible; of a link only the link itself, not its target."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    if source.is_symlink():
        return
    outside = set(links_that_leave(source))  # readers of the checkpoint may not be allowed to read their targets
    for path in files_below(source):
        name = path.relative_to(source)
        goal = target / name
        if not goal.exists() and name.as_posix() not in outside:
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, goal)


def flush(folder: Path) -> None:
    """Flushes the files and directories below a directory, and itself, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        flush_path(path)


def link_unchanged(staging: Path, files: Mapping[str, FileEntry], before: Path) -> int:
    """Replaces staged files by links to equal files of an older checkpoint; returns the bytes saved.

    No file is written through a link: each checkpoint is staged with its own files, and a link joins only two
    complete files that are equal byte for byte.
    """
    older = Manifest.read(before)
    saved = 0
    older_files = {} if older is None else older.files
    for name, entry in files.items():
        is_equal = entry["size"] >= MIN_BYTES and older_files.get(name, {}).get(DIGEST) == entry[DIGEST]
        if is_equal and _link(before / name, staging / name):
            saved += entry["size"]
    return saved


def _link(source: Path, staged: Path) -> bool:
    try:
        if source.is_symlink() or not filecmp.cmp(source, staged, shallow=False):
            return False
        with replacing(staged) as beside:
            os.link(source, beside)
    except OSError:  # deleted meanwhile, or a file system without hard links: the file stays as written
        return False
    return True


# -- which ones may be deleted: pure functions without disk access -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of this run: its step, and the time when it was written, in seconds."""

    step: int
    written_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Rules for the checkpoints to keep."""

    # number of the newest ones, including the best; None for all. With 1, two are kept: newest and best.
    last: int | None = None
    every_steps: int | None = None  # beyond that number, the checkpoints at multiples of this number of steps
    # beyond that number, the oldest, and then each one at least this many seconds younger than the last
    every_s: float | None = None


def to_remove(saved: Iterable[Saved], keep: Keep, *, newest: int, best: int | None = None) -> set[int]:
    """Returns the steps of one run's checkpoints that may be deleted after saving `newest`; `best` is the best."""
    behind = sorted((one for one in saved if one.step <= newest), key=lambda one: one.step)
    if keep.last is None:
        return set()
    stays = {newest, best} | milestones(behind, keep)
    counted = {newest, best} & {one.step for one in behind}
    for one in reversed(behind):
        if len(counted) >= keep.last:
            break
        counted.add(one.step)
    return {one.step for one in behind} - stays - counted


def milestones(saved: list[Saved], keep: Keep) -> set[int]:
    """Returns the steps that are kept permanently. A later call returns them again."""
    found = {one.step for one in saved if keep.every_steps and one.step % keep.every_steps == 0}
    if keep.every_s is None:
        return found
    last = None
    for one in saved:
        if last is None or one.written_at - last >= keep.every_s:
            found.add(one.step)
            last = one.written_at
    return found
