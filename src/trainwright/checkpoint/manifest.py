"""The manifest of a checkpoint: every file with size and checksum, so that a reader knows that all of it is there."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainwright.types import MANIFEST_NAME

FORMAT_VERSION = 1
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is made of.

    Attributes:
        step: optimizer steps done.
        run_id: the run that wrote it; only this run may delete it.
        world_size: processes that trained.
        written_at: seconds since 1970; tells the newest where several runs wrote into one directory.
        cursor: position in the data, as `data.cursor.Cursor` stores it.
        files: path below the checkpoint -> {"size": bytes, "crc32": 8 hex digits}.
    """

    step: int
    run_id: str
    world_size: int = 1
    written_at: float = field(default_factory=time.time)
    cursor: dict[str, Any] | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """The same for two copies of one checkpoint, and for no other one."""
        return _checksum_of(asdict(self))

    def write(self, folder: Path) -> None:
        values = asdict(self)
        text = json.dumps({**values, "crc32": _checksum_of(values)}, indent=2, sort_keys=True)
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint; None if it has none (another trainer wrote it) or it is damaged."""
        try:
            values = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
            if values.pop("crc32") != _checksum_of(values):
                return None
            return cls(**values)
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None


def _checksum_of(values: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def files_below(folder: Path) -> Iterator[Path]:
    """Regular files of a checkpoint, the manifest left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST_NAME:
            yield path


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": checksum(path)}
        for path in files_below(folder)
    }


def checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def find_problem(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, naming the file; None if all that its manifest lists is there, unchanged.

    A checkpoint without a manifest is accepted if it has a trainer state: transformers writes that file last.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        if (folder / MANIFEST_NAME).exists():
            return f"{MANIFEST_NAME} is damaged"
        return None if (folder / "trainer_state.json").is_file() else "trainer_state.json is missing"
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        if checksum(path) != expected["crc32"]:
            return f"{name} was altered: its checksum does not match"
    return None
