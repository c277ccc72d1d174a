"""Changes to a written checkpoint by callbacks, overrides and people, and updating its manifest for them.

A callback's `on_save`, or an override of `_save_checkpoint`, may rewrite, add or delete files of a checkpoint that is
already on disk. `ChangeWatch` records size, time and inode of each file before such code is called. Afterwards it reads
the files that differ again, and replaces the manifest in one rename.

From the first changed file until that rename, the checkpoint does not verify. If the process is killed in between, that
remains so, and a resume uses the next older checkpoint; after the rename it verifies with its changes. No write order
could do better: by the time a change is noticed, the file described in the old manifest is gone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainwright._types import MANIFEST_NAME, replacing
from trainwright.checkpoint.manifest import (
    FileEntry,
    Manifest,
    command_to_accept,
    describe_file,
    differing_files,
    files_below,
    flush_path,
    links_that_leave,
)
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

# Time resolution of a disk. A file written this shortly before its mark may be rewritten without a new time.
TIME_STEP_NS = 20_000_000

NotFinite = Callable[[Path], str | None]  # file -> name of its first non-finite tensor


class FileMark(NamedTuple):
    """File attributes that change with the file, read without opening it."""

    size: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Marks of the files of one checkpoint at one moment, with its manifest."""

    manifest: Manifest
    marks: dict[str, FileMark]
    taken_ns: int

    @classmethod
    def from_folder(cls, folder: Path, manifest: Manifest) -> Snapshot:
        return cls(manifest, read_marks(folder), time.time_ns())

    def changed_since(self, folder: Path) -> set[str]:
        """Returns the names of files that are new, deleted, or possibly different from the snapshot."""
        now = read_marks(folder)
        names = now.keys() | self.marks.keys()
        return {name for name in names if now.get(name) != self.marks.get(name) or self._is_in_doubt(now[name])}

    def _is_in_doubt(self, mark: FileMark) -> bool:
        return abs(self.taken_ns - mark.modified_ns) <= TIME_STEP_NS


class ChangeWatch:
    """Watches the checkpoints of one run while user code may change them."""

    def __init__(self, not_finite: NotFinite) -> None:
        self._not_finite = not_finite
        self._snapshots: dict[Path, Snapshot] = {}

    def add(self, folder: Path, manifest: Manifest, *, final: Path | None = None) -> None:
        """Records the marks of a checkpoint; `final` is its future path, if that is different."""
        self._snapshots[folder if final is None else final] = Snapshot.from_folder(folder, manifest)

    def settle(self) -> None:
        """Updates manifests for changes since `add`, once. Errors are logged: such a checkpoint does not verify."""
        snapshots = self._snapshots
        self._snapshots = {}
        for folder, before in snapshots.items():
            try:
                self._settle_one(folder, before)
            except OSError as error:
                logger.error(
                    "Files of %s were changed after it was written, but its manifest could not be replaced: %s. "
                    "Accept them with: %s",
                    folder,
                    error,
                    command_to_accept(folder),
                )

    def _settle_one(self, folder: Path, before: Snapshot) -> None:
        if not folder.is_dir():  # deleted by the rotation, or by user code
            return
        manifest = Manifest.read(folder)
        changed = before.changed_since(folder)
        if manifest is not None and not changed:
            return
        listed = list_anew(folder, manifest or before.manifest, changed, not_finite=self._not_finite)
        if manifest is None or listed.files != manifest.files:
            write_manifest(folder, listed, changed)
            logger.info("Files of %s were changed by a callback or an override; its manifest was updated.", folder)


def read_marks(folder: Path) -> dict[str, FileMark]:
    """Returns the marks of the files below a directory, by relative path."""
    marks = {}
    for path in files_below(folder):
        status = path.stat()
        marks[path.relative_to(folder).as_posix()] = FileMark(status.st_size, status.st_mtime_ns, status.st_ino)
    return marks


def list_anew(folder: Path, manifest: Manifest, names: Iterable[str], *, not_finite: NotFinite) -> Manifest:
    """Returns a manifest with updated entries for the named files; only these are read."""
    files = dict(manifest.files)
    for name in names:
        before = files.pop(name, {})
        path = folder / name
        if not path.is_file():
            continue
        entry: FileEntry = describe_file(path)
        tensor = not_finite(path)
        if tensor is None and entry == {key: value for key, value in before.items() if key != "non_finite"}:
            tensor = before.get("non_finite")  # unchanged: its non-finite tensor is still there
        if tensor is not None:
            entry["non_finite"] = tensor
        files[name] = entry
    return replace(manifest, files=files)


def write_manifest(folder: Path, manifest: Manifest, changed: Iterable[str]) -> None:
    """Flushes changed files, then replaces the manifest: a reader finds the old one or the new one."""
    for name in changed:
        if (folder / name).is_file():
            flush_path(folder / name)
    with replacing(folder / MANIFEST_NAME) as beside:
        beside.write_text(manifest.text(), encoding="utf-8")
        flush_path(beside)
    flush_path(folder)


# -- manually ----------------------------------------------------------------------------------------------------------


def accept(folder: Path, *, not_finite: NotFinite) -> dict[str, str]:
    """Updates the manifest of a checkpoint to its current files; returns name -> "changed", "added" or "deleted".

    Raises CheckpointError if that is impossible: without a valid manifest, or with a link that leaves the directory.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        state = "damaged" if os.path.lexists(folder / MANIFEST_NAME) else "missing"
        raise CheckpointError(
            f"{folder} cannot be accepted: its {MANIFEST_NAME} is {state}, and without it the step, the run and the "
            "position in the data are unknown. Use another checkpoint, or load the model alone with from_pretrained."
        )
    link = next(links_that_leave(folder), None)
    if link is not None:
        raise CheckpointError(
            f"{folder} cannot be accepted: {link} is a link that leaves the directory. Copy the checkpoint with cp -rL."
        )
    for beside in folder.glob(f".{MANIFEST_NAME}.*.partial"):  # left by a process killed while replacing it
        beside.unlink()
    found = differing_files(folder, manifest)
    if found:
        write_manifest(folder, list_anew(folder, manifest, found, not_finite=not_finite), found)
    return found
