"""Files that did not change since the checkpoint before: one place on the disk under two names."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping
from pathlib import Path

from trainwright._types import replacing
from trainwright.checkpoint.manifest import DIGEST, FileEntry, Manifest

# Small files save nothing worth having, and they are the ones that people edit in place.
MIN_BYTES = 1 << 20


def link_unchanged(staging: Path, files: Mapping[str, FileEntry], before: Path) -> int:
    """Replaces staged files by links to equal files of an older checkpoint.

    No file is written through a link: each checkpoint is staged with files of its own, and a link joins only two
    complete files that are equal byte for byte.

    Args:
        staging: the staged checkpoint.
        files: its entries of the manifest.
        before: the older checkpoint.

    Returns:
        Bytes saved.
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
    try:
        if source.is_symlink() or not filecmp.cmp(source, staged, shallow=False):
            return False
        with replacing(staged) as beside:
            os.link(source, beside)
    except OSError:  # gone meanwhile, or a file system without links: the file stays as it was written
        return False
    return True
