"""The manifest of a checkpoint: every file with size and checksum, so that a reader knows it is complete."""

from __future__ import annotations

import json
import mmap
import os
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeAlias

import xxhash

from trainwright._types import MANIFEST_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_JSON_NAME, JSONObject, is_count
from trainwright.errors import CheckpointError
from trainwright.support.door import MALFORMED, parse_json, read_bytes

FORMAT_VERSION = 1
BLOCK_BYTES = 1 << 20
MAX_BYTES = 64 << 20  # for a manifest
DIGEST = "xxh3"
OLDER_DIGEST = "crc32"

FileEntry: TypeAlias = JSONObject  # {"size": bytes, digest: hex digits}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint."""

    step: int  # optimizer steps done
    run_id: str  # the run that wrote it; only this run may delete it
    world_size: int = 1  # processes that trained
    # seconds since 1970; decides which is newest if several runs wrote into one directory
    written_at: float = field(default_factory=time.time)
    cursor: JSONObject | None = None  # position in the data, as `data.cursor.Cursor` stores it
    # relative path -> {"size": bytes, "xxh3": 16 hex digits}
    files: dict[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """Checksum that is equal only for copies of the same checkpoint."""
        return _compute_checksum(asdict(self))

    @property
    def non_finite_mark(self) -> str | None:
        """Describes the values marked as not finite; None if there are none."""
        for name, entry in self.files.items():
            if "non_finite" in entry:
                return f"{entry['non_finite']} in {name} is not finite"
        return None

    def text(self) -> str:
        """Returns the content of the file."""
        values = asdict(self)
        return json.dumps({**values, "crc32": _compute_checksum(values)}, indent=2, sort_keys=True)

    def write(self, folder: Path) -> None:
        """Writes the manifest into a checkpoint."""
        (folder / MANIFEST_NAME).write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Reads the manifest of a checkpoint; None if it is missing (another trainer wrote it) or damaged."""
        try:
            content = read_bytes(folder / MANIFEST_NAME, max_bytes=MAX_BYTES)
        except (OSError, ValueError):
            return None
        return cls.parse(content)

    @classmethod
    def parse(cls, content: bytes) -> Manifest | None:
        """Parses the content of a manifest file; None if it is damaged."""
        try:
            values = parse_json(content)
            if values.pop("crc32") != _compute_checksum(values):
                return None
            manifest = cls(**values)
        except MALFORMED:
            return None
        return manifest if manifest._is_sound() else None

    def _is_sound(self) -> bool:
        return (
            isinstance(self.run_id, str)
            and isinstance(self.written_at, (int, float))
            and abs(self.written_at) < sys.maxsize
            and isinstance(self.cursor, (dict, type(None)))
            and is_count(self.step)
            and is_count(self.world_size)
            and isinstance(self.files, dict)
            and all(isinstance(entry, dict) and is_count(entry.get("size")) for entry in self.files.values())
        )


def _compute_checksum(values: JSONObject) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the regular files of a checkpoint except the manifest."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST_NAME:
            yield path


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Returns size and digest of each file of a newly written checkpoint."""
    return {path.relative_to(folder).as_posix(): describe_file(path) for path in files_below(folder)}


def describe_file(path: Path) -> FileEntry:
    """Returns size and digest of a file."""
    try:
        value = _digest_written(path)
    except (MemoryError, OSError, ValueError):  # no room to map the file, or a disk without mapping
        value = digest(path)
    return {"size": path.stat().st_size, DIGEST: value}


def _digest_written(path: Path) -> str:
    """Computes `digest` over a mapping of a newly written file, so no process truncates it."""
    value = xxhash.xxh3_64()
    if path.stat().st_size > 0:  # an empty file cannot be mapped
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            for start in range(0, len(view), BLOCK_BYTES):  # in blocks, so that signals are handled in between
                with view[start : start + BLOCK_BYTES] as block:
                    value.update(block)
                    num_bytes = len(block)
                if hasattr(mmap, "MADV_DONTNEED"):  # otherwise the whole file counts as memory of this process
                    content.madvise(mmap.MADV_DONTNEED, start, num_bytes)
    return value.hexdigest()


def digest(path: Path, kind: str = DIGEST) -> str:
    """Returns the checksum of a file; the older kind is only for reading."""
    value = xxhash.xxh3_64()
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if kind == DIGEST:
                value.update(block)
            else:
                crc = zlib.crc32(block, crc)
    return value.hexdigest() if kind == DIGEST else f"{crc:08x}"


def digest_content(content: bytes, kind: str) -> str:
    """Returns the checksum of file content in memory."""
    return xxhash.xxh3_64(content).hexdigest() if kind == DIGEST else f"{zlib.crc32(content):08x}"


def find_problem(folder: Path) -> str | None:
    """Returns the first problem of a checkpoint, with its file; None if all files in the manifest are unchanged."""
    return next(problems(folder), None)


def problems(folder: Path) -> Iterator[str]:
    """Yields all problems of a checkpoint.

    A checkpoint without a manifest is accepted if it has a trainer state: transformers writes that file last.
    """
    yield from list_problems(folder, Manifest.read(folder))


def list_problems(
    folder: Path, manifest: Manifest | None, *, compute_digest: Callable[[Path, str], str] = digest
) -> Iterator[str]:
    """Yields all problems of a checkpoint with an already parsed manifest.

    `compute_digest` returns the checksum of a file, for a kind. The manifest is None if it is missing or damaged.
    """
    try:
        yield from _problems(folder, manifest, compute_digest)
    except OSError as error:
        yield f"{Path(error.filename or folder).name} cannot be read: {error.strerror or error}"


def _problems(folder: Path, manifest: Manifest | None, compute_digest: Callable[[Path, str], str]) -> Iterator[str]:
    for link in links_that_leave(folder):
        yield f"{link} is a link that leaves the directory. If you trust it, copy the checkpoint with cp -rL"
    for name in names_without_content(folder):
        yield f"{name} is a pipe or a device, which a reader would wait for. Delete it"
    if manifest is None:
        if (folder / MANIFEST_NAME).exists():
            if (folder / MANIFEST_NAME).is_file():
                (folder / MANIFEST_NAME).open("rb").close()  # raises if it may not be read
            yield f"{MANIFEST_NAME} is damaged"
        elif (folder / TRAINING_ARGS_JSON_NAME).is_file():  # only this package writes it
            yield f"{MANIFEST_NAME} is missing"
        elif not (folder / TRAINER_STATE_NAME).is_file():
            yield f"{TRAINER_STATE_NAME} is missing"
        return
    for name, expected in manifest.files.items():
        problem = _check_file(folder, name, expected, compute_digest)
        if problem is not None:
            yield problem


def differing_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Returns the files that differ from the manifest: name -> "changed", "added" or "deleted".

    Raises CheckpointError if the manifest lists a file outside the directory.
    """
    found = {}
    for name, expected in manifest.files.items():
        if is_outside(name):
            raise CheckpointError(f"{folder}: {MANIFEST_NAME} lists {name!r}, which is outside the directory.")
        if _check_file(folder, name, expected, digest) is not None:
            found[name] = "changed" if (folder / name).is_file() else "deleted"
    names = (path.relative_to(folder).as_posix() for path in files_below(folder))
    return found | {name: "added" for name in names if name not in manifest.files}


def is_outside(name: str) -> bool:
    """Returns True for a name in a manifest that leads out of the checkpoint's directory."""
    paths = PurePosixPath(name), PureWindowsPath(name)  # it may have been written on any system
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def _check_file(folder: Path, name: str, expected: FileEntry, compute_digest: Callable[[Path, str], str]) -> str | None:
    if is_outside(name):
        return f"{MANIFEST_NAME} lists {name!r}, which is outside the directory"
    path = folder / name
    kind = next((kind for kind in (DIGEST, OLDER_DIGEST) if kind in expected), None)
    cure = f"(if you changed it on purpose: {command_to_accept(folder)})"
    if not path.is_file():
        return f"{name} is missing {cure}"
    if path.stat().st_size != expected["size"]:
        return f"{name} has {path.stat().st_size} bytes instead of {expected['size']} {cure}"
    if kind is None:
        return f"{name} has no checksum that this version can compute"
    if compute_digest(path, kind) != expected[kind]:
        return f"{name} was altered: its checksum does not match {cure}"
    return None


def command_to_accept(folder: Path) -> str:
    """Returns the command that updates a checkpoint's manifest to its current files."""
    return f"trainwright verify --accept {shlex.quote(str(folder))}"


def flush_path(path: Path) -> None:
    """Flushes a file or a directory to the disk."""
    if os.name == "nt" and path.is_dir():  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_without_content(folder: Path) -> Iterator[str]:
    """Yields the names in a checkpoint that are neither a file, a directory nor a link to one: pipes, devices."""
    for path in sorted(folder.rglob("*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path.relative_to(folder).as_posix()


def links_that_leave(folder: Path) -> Iterator[str]:
    """Yields the links in a checkpoint that lead out of it, or nowhere."""
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            try:
                is_inside = path.resolve(strict=True).is_relative_to(inside)
            except (OSError, RuntimeError):  # it points nowhere, or at itself
                is_inside = False
            if not is_inside:
                yield path.relative_to(folder).as_posix()
