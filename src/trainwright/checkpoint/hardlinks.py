"""Files that did not change since the checkpoint before: one place on the disk under two names."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping
from pathlib import Path

from trainwright.checkpoint.manifest import DIGEST, Manifest

# Small files save nothing worth having, and they are the ones that people edit in place.
MIN_BYTES = 1 << 20


def link_unchanged(staging: Path, files: Mapping[str, Mapping[str, object]], before: Path) -> int:
    """Replaces staged files by links to equal ones of an older checkpoint; returns the bytes that saves.

    Nothing is ever written through a link: each checkpoint begins with files of its own, and a link is made only of
    two files that are whole and equal byte for byte.
    """
    older = Manifest.read(before)
    saved = 0
    for name, entry in files.items():
        size = entry["size"]
        is_candidate = (
            older is not None and size >= MIN_BYTES and older.files.get(name, {}).get(DIGEST) == entry[DIGEST]
        )
        if is_candidate and _link(before / name, staging / name):
            saved += size
    return saved


def _link(source: Path, staged: Path) -> bool:
    beside = staged.with_name(f"{staged.name}.link")
    try:
        if source.is_symlink() or not filecmp.cmp(source, staged, shallow=False):
            return False
        os.link(source, beside)
        os.replace(beside, staged)
    except OSError:  # gone meanwhile, or a file system without links: the file stays as it was written
        beside.unlink(missing_ok=True)
        return False
    return True
