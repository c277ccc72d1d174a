"""The run that a trainer works on: exchanged for a training or a dry run, and followed by an idle one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def using_run(trainer: Any, run: Any) -> Iterator[None]:  # Any: a Trainer, whose class is above; a Run, beside
    """Context in which a trainer works on a run; afterwards it has the idle run that follows."""
    before = trainer._run
    trainer._run = run
    try:
        yield
    finally:
        trainer._run = run.ended(before)
