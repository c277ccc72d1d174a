"""Which files a command may write: never one that it reads, under whatever name, and no device or pipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainwright._types import VALUES_FILE, is_url
from trainwright.capability_table import RUN_FILES
from trainwright.errors import ArgumentError

RESULTS = (".html", ".jsonl")  # suffixes of what commands write, which may replace an earlier one in a run's directory
OF_A_RUN = ("journal.jsonl", *(file.name for file in RUN_FILES))  # lists that no command makes again


def check_output(out: Path, reads: Sequence[Path | str] = (), *, option: str) -> None:
    """Raises ArgumentError if a file to write is one that the command reads, or no regular file.

    Args:
        out: the file.
        reads: what the command reads: files, directories (with all that is below them), URLs.
        option: name of the option that gave the file.
    """
    if out.exists() and not out.is_file():
        raise ArgumentError(f"{option} {out} is not a regular file. Name a file that is new, or may be replaced.")
    for one in reads:
        if not is_url(one) and _is_part(out, Path(one)):
            raise ArgumentError(f"{option} {out} would replace what the command reads ({one}). Name another file.")


def _is_part(out: Path, read: Path) -> bool:
    written = Path(os.path.realpath(out))
    if not written.is_file() or not read.exists():
        return False
    if read.is_dir():
        return not _is_result(written) and any(os.path.samefile(read, folder) for folder in written.parents)
    return os.path.samefile(read, written)


def _is_result(path: Path) -> bool:
    """Returns whether a file in a directory that is read may be an earlier result of a command."""
    is_of_a_run = path.name in OF_A_RUN or VALUES_FILE.match(path.name) is not None
    return path.suffix in RESULTS and not is_of_a_run
