"""The run that a trainer works on: replaced for a training or a dry run, and followed by an idle one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.run.internals import Internals
from trainwright.run.run import Run


@contextmanager
def using_run(trainer: Any, run: Run) -> Iterator[None]:  # Any: a Trainer; its class is in a higher package
    """Lets a trainer work on a run inside the context; afterwards it has the idle run that follows."""
    internals = Internals(trainer)
    before = internals.run
    internals.run = run
    try:
        yield
    finally:
        internals.run = run.ended(before)
