"""Which process sends or fetches which file of a checkpoint, where several do it together. Pure decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from trainwright.checkpoint.manifest import FileEntry

# Shards as torch names them, and files that each process has of its own, as `rng.file_name` names them.
_OF_RANK = re.compile(r"(?:^|/)(?:__(\d+)_\d+\.distcp|[a-z][a-z_]*_(\d+)\.(?:pth?|json|parquet))$")


def find_owner(name: str) -> int | None:
    """Returns the rank of the process that a file of a checkpoint belongs to; None for a file of the whole run."""
    match = _OF_RANK.search(name)
    return None if match is None else int(match[1] or match[2])


def shares(files: Mapping[str, FileEntry], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Returns the files that each of these processes fetches: its own, and of the others about as many bytes as each.

    Args:
        files: of the checkpoint, with their sizes.
        ranks: processes with one disk; each file is fetched by one of them.
    """
    found: dict[int, list[str]] = {rank: [] for rank in ranks}
    num_bytes = dict.fromkeys(ranks, 0)
    rest = []
    for name, entry in files.items():
        owner = find_owner(name)
        if owner in found:
            found[owner].append(name)
            num_bytes[owner] += entry["size"]
        else:
            rest.append(name)
    for name in sorted(rest, key=lambda name: (-files[name]["size"], name)):
        least = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        found[least].append(name)
        num_bytes[least] += files[name]["size"]
    return found


def select_node_files(names: Iterable[str], ranks: range) -> list[str]:
    """Returns the files that belong to the processes of a node."""
    return [name for name in names if find_owner(name) in ranks]
