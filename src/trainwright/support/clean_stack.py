"""Imports of torch on a stack of their own, so that they keep no object of a run.

torch imports its compiler when a process makes its first optimizer, and functions of that import keep their own frame,
and with it all frames below, until a garbage collection: a trainer that made the optimizer would stay, with its model.
"""

from __future__ import annotations

from functools import cache

import torch

from trainwright.support.deadline import within

LONGEST_S = 300.0  # seconds; after that it is imported where it is needed


@cache
def import_compiler() -> None:
    """Imports what torch needs to make an optimizer, on a thread of its own; once for a process."""
    within(LONGEST_S, lambda: torch.compiler.disable(lambda: None))  # type: ignore[no-untyped-call]
