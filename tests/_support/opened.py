"""Counts how often files of checkpoints are opened in this process, whoever opens them."""

from __future__ import annotations

import builtins
import io
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def opened_files() -> Iterator[Counter[str]]:
    """Counts by "directory/file" what `open` opens in directories named checkpoint-*, until the context ends."""
    counts: Counter[str] = Counter()
    really_open = builtins.open

    def counting_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            path = Path(file)
            if path.parent.name.startswith("checkpoint-"):
                counts[f"{path.parent.name}/{path.name}"] += 1
        return really_open(file, *args, **kwargs)

    with mock.patch.object(builtins, "open", counting_open), mock.patch.object(io, "open", counting_open):
        yield counts
