"""Directories of checkpoints: staged, committed by rename, listed, deleted; which old ones may be deleted.

A checkpoint exists or it does not: files are written into a staging directory beside the final one, flushed to disk,
listed in a manifest, and the directory is renamed. A reader never sees a half-written checkpoint under its final name.

Only checkpoints that this run wrote are ever deleted, and among these never the one that was just written (nor those
of later steps, which a run that went back will write again) and never the best. Of the others stay the last ones up to
the limit, and beyond it one for each so many steps and one for each length of time, as `Keep` says.

Before a commit the weights are looked at, which were just written, so their pages are in memory: NaN and infinity are
marked or refused. Buffers are not looked at: masks and ranges that are observed begin with infinities.
"""

from __future__ import annotations

import filecmp
import json
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
)
from trainwright.errors import CheckpointError, CheckpointNotFoundError, NonFiniteWeightsError
from trainwright.support.host import is_process_alive

logger = logging.getLogger(__name__)

_FINAL = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_BESIDE = re.compile(
    rf"^\.{PREFIX_CHECKPOINT_DIR}-(?P<step>\d+)\.(?P<host>.+)\.(?P<pid>\d+)(\.t[0-9a-f]+)?\."
    r"(?P<purpose>staging|replaced|removed)$"
)

MIN_BYTES = 1 << 20  # smaller files save nothing worth having, and they are the ones that people edit in place
PIECE = 1 << 18  # elements that are compared at once, so that they stay in the cache
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
NOT_WEIGHTS = ("optimizer", "rng_state")  # beginnings of names
_IN_USE: set[Path] = set()  # staging directories that this process is writing, maybe behind training's back


Pieces = Callable[[Path], Iterable[tuple[str, str, torch.Tensor]]]  # directory -> file in it, name of tensor, values


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Rule for the weights of a checkpoint."""

    # weights that are not finite are refused where a good checkpoint exists; else they are only marked
    is_strict: bool = False
    refuses_first: bool = False  # they are refused even where no good checkpoint exists
    buffers: frozenset[str] = frozenset()  # names of tensors that are no weights
    shards: Pieces = lambda folder: ()  # reads the weights of a sharded checkpoint, piece by piece
    # returns a file beside the weights, and a value in it, for which a checkpoint is only marked
    find_beside: Callable[[Path], tuple[str, str] | None] = lambda folder: None

    def find(self, folder: Path) -> tuple[str, str] | None:
        """Returns the first file below a directory, and its tensor, that is not finite; None where all are.

        Args:
            folder: with weights as safetensors, in torch's files, or sharded; other files are not read.
        """
        for path in sorted(path for pattern in WEIGHTS for path in folder.rglob(pattern)):
            name = self.first_in(path)
            if name is not None:
                return path.relative_to(folder).as_posix(), name
        shards = self.shards(folder)
        return next(((at, name) for at, name, one in shards if name not in self.buffers and not _is_finite(one)), None)

    def first_in(self, path: Path) -> str | None:
        """Returns the first tensor of a file of weights that is not finite; None for all other files, unread."""
        from safetensors import SafetensorError

        if path.name.startswith(NOT_WEIGHTS) or not any(path.match(pattern) for pattern in WEIGHTS):
            return None
        try:
            try:
                return self._first_of(_tensors_of(path))
            except (MemoryError, OSError):  # no room to map the whole file
                return self._first_of(_pieces_of(path)) if path.suffix == ".safetensors" else None
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, AttributeError):  # the user's own, so named
            return None

    def _first_of(self, named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        return next((name for name, one in named if name not in self.buffers and not _is_finite(one)), None)


def _pieces_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the floating-point tensors of a safetensors file in pieces of `PIECE` elements, through one buffer."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        for name, about in header.items():
            dtype = FLOATS.get(about.get("dtype"))
            if dtype is None:  # the metadata, and numbers that cannot be infinite
                continue
            start, end = about["data_offsets"]
            file.seek(8 + header_bytes + start)
            left = end - start
            buffer = bytearray(min(left, PIECE * dtype.itemsize))
            while left > 0:
                size = file.readinto(memoryview(buffer)[: min(left, len(buffer))])
                left -= size
                yield name, torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize)


def _tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- no mapping
                yield name, file.get_tensor(name)
    else:
        yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()


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
        self._weights = weights  # what is asked of the weights of a checkpoint that is committed
        self._token = f"t{uuid.uuid4().hex[:8]}"  # another store of this process has directories of its own
        self.watch: ChangeWatch | None = None  # told of each checkpoint that is committed, if the user's code sees it

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
        """Returns the steps of the checkpoints whose weights are marked as not finite."""
        return {step for step, path in _finals(self.root) if Checkpoint(path).non_finite_mark is not None}

    def watch_for_changes(self, run_id: str) -> ChangeWatch:
        """Returns a watch over the checkpoints of a run: those that are there, and those committed from now on."""
        self.watch = ChangeWatch(self._weights.first_in)
        for _, path in _finals(self.root):
            manifest = Manifest.read(path)
            if manifest is not None and manifest.run_id == run_id:
                self.watch.add(path, manifest)
        return self.watch

    def stage(self, step: int) -> Path:
        """Makes an empty directory to write a checkpoint into."""
        staging = self._beside(step, "staging")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _IN_USE.add(staging.absolute())
        return staging

    def commit(self, staging: Path, manifest: Manifest) -> Path:
        """Flushes, lists and renames a staged checkpoint; returns its final path.

        Files that somebody wrote under the final name meanwhile are kept, unless the checkpoint has them too. Large
        files that are as they were in this run's checkpoint before it share its place on the disk. Weights that are not
        finite, and values beside them, are marked in the manifest, which comes without its files; where the check is
        strict and the run has a checkpoint to go back to, such weights are a NonFiniteWeightsError.
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
                    f"Checkpoint {final} is not written: {tensor} in {name} is not finite. {newest} one whose weights "
                    "are finite. Lower the learning rate, or look at the data of that step; "
                    "on_nonfinite='ignore' writes such checkpoints too."
                )
            files[name]["non_finite"] = tensor
        elif (marked := self._weights.find_beside(staging)) is not None:
            name, tensor = marked
            files[name]["non_finite"] = tensor
            logger.warning(
                "Checkpoint %s is marked: %s in %s is not finite, though the weights are. A resume takes an older one. "
                "Look for what writes such values; on_nonfinite='ignore' does not look for them.",
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
        """Gives a staged checkpoint, complete and flushed, its final path, and returns that."""
        final = self.path(step)
        replaced = self._beside(step, "replaced")
        if os.path.lexists(final):
            _delete(replaced)
            _IN_USE.add(replaced.absolute())  # a reader in this process must not put it back meanwhile
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
        # Renamed first: killed half-way through the files, what is left must not pass for a checkpoint.
        going = self._beside(step, "removed")
        _delete(going)
        self.path(step).rename(going)
        _delete(going)

    def clean(self) -> None:
        """Removes incomplete checkpoints of dead processes of this machine; those of live ones stay."""
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
        """Returns the directories that dead processes of this machine left beside the checkpoints."""
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
        """Returns the newest checkpoint without a problem; warns of newer ones with one, and of the reason."""
        self._finish_commits()
        for checkpoint in _newest_first(self.root):
            problem = checkpoint.non_finite_mark or why_not(checkpoint)
            if problem is None:
                return checkpoint
            logger.warning("Checkpoint %s is skipped: %s. Trying the one before it.", checkpoint, problem)
        return None


def verified(path: str | Path, *, argument: str = "resume_from_checkpoint") -> Checkpoint:
    """Opens a checkpoint that the user named by an argument; an error where it is missing or altered names the file."""
    checkpoint = Checkpoint(path)
    folder = checkpoint.path
    if not folder.is_dir():
        there = [str(p) for _, p in sorted(_finals(folder.parent))]
        raise CheckpointNotFoundError(
            f"Can't find a valid checkpoint at {path} ({argument}): there is no such directory. "
            + (f"Beside it: {', '.join(there)}." if there else f"There is no checkpoint in {folder.parent} either.")
        )
    problem = checkpoint.find_problem()
    if problem is not None:
        or_newest = ", or pass True to take the newest one that is complete" if argument != "branch_from" else ""
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

    In a directory with several runs the highest step need not be the newest; within one the clock decides nothing.
    """
    found = [(step, Checkpoint(path)) for step, path in _finals(root)]
    last: dict[str, float] = {}  # run -> when it wrote its last checkpoint
    for _, checkpoint in found:
        manifest = checkpoint.manifest
        when = checkpoint.path.stat().st_mtime if manifest is None else manifest.written_at
        run = _run_id_of(checkpoint)
        last[run] = max(when, last.get(run, when))
    found.sort(key=lambda one: (last[_run_id_of(one[1])], one[0]), reverse=True)
    return [checkpoint for _, checkpoint in found]


def _run_id_of(checkpoint: Checkpoint) -> str:
    """Returns the run that wrote a checkpoint; empty if it does not say."""
    return "" if checkpoint.manifest is None else checkpoint.manifest.run_id


def _finals(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir() if root.is_dir() else ():
        match = _FINAL.match(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def _delete(path: Path) -> None:
    """Deletes a directory as far as possible; of a link only the link, since what it leads to lies elsewhere."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    for path in files_below(source):
        goal = target / path.relative_to(source)
        if not goal.exists():
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, goal)


def flush(folder: Path) -> None:
    """Flushes the files and directories below a directory, and itself, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        flush_path(path)


def link_unchanged(staging: Path, files: Mapping[str, FileEntry], before: Path) -> int:
    """Replaces staged files by links to equal files of an older checkpoint; returns the bytes saved.

    No file is written through a link: each checkpoint is staged with files of its own, and a link joins only two
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
    except OSError:  # gone meanwhile, or a file system without links: the file stays as it was written
        return False
    return True


# -- which ones may be deleted: pure functions without disk access -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of this run: its step, and when it was written, in seconds."""

    step: int
    written_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Rules of the checkpoints to keep."""

    # number of the newest ones, the best one included; None for all. With 1 these can be two: newest and best.
    last: int | None = None
    every_steps: int | None = None  # beyond that number, the checkpoints at multiples of this many steps
    # beyond that number, the oldest, and then each that is at least this many seconds younger than the last
    every_s: float | None = None


def to_remove(saved: Iterable[Saved], keep: Keep, *, newest: int, best: int | None = None) -> set[int]:
    """Returns the steps of one run whose checkpoints may be deleted after `newest` was saved; `best` is the best."""
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
    """Returns the steps that are kept for good. A later call returns them again."""
    found = {one.step for one in saved if keep.every_steps and one.step % keep.every_steps == 0}
    if keep.every_s is None:
        return found
    last = None
    for one in saved:
        if last is None or one.written_at - last >= keep.every_s:
            found.add(one.step)
            last = one.written_at
    return found
