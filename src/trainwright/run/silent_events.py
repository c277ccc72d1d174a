"""SilentEvents: discards events, for trials before a run."""

from __future__ import annotations


class SilentEvents:
    """Replaces the run and its events: no callback is called, and signals have no effect."""

    def __init__(self) -> None:
        self.interrupts = self

    def fire(self, event: str, progress: object, **kwargs: object) -> None: ...

    def passes(self) -> None: ...

    open = close = passes
