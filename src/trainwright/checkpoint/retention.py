"""Retention: decides which old checkpoints may be deleted. Pure functions without disk access.

Only checkpoints that this run wrote are ever deleted, and among these never the one that was just written (nor those
of later steps, which a run that went back will write again) and never the best. Of the others stay the last ones up to
the limit, and beyond it one for each so many steps and one for each length of time, as `Keep` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of this run: its step, and when it was written, in seconds."""

    step: int
    written_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Rules of the checkpoints to keep."""

    # number of the newest ones, the best one included; None for all. With 1 these can be two: newest and best.
    last: int | None = None
    every_steps: int | None = None  # beyond that number, the checkpoints at multiples of this many steps
    # beyond that number, the oldest, and then each that is at least this many seconds younger than the last
    every_s: float | None = None


def to_remove(saved: Iterable[Saved], keep: Keep, *, newest: int, best: int | None = None) -> set[int]:
    """Returns the steps of one run whose checkpoints may be deleted after `newest` was saved; `best` is the best."""
    behind = sorted((one for one in saved if one.step <= newest), key=lambda one: one.step)
    if keep.last is None:
        return set()
    stays = {newest, best} | milestones(behind, keep)
    counted = {newest, best} & {one.step for one in behind}
    for one in reversed(behind):
        if len(counted) >= keep.last:
            break
        counted.add(one.step)
    return {one.step for one in behind} - stays - counted


def milestones(saved: list[Saved], keep: Keep) -> set[int]:
    """Returns the steps that are kept for good. A later call returns them again."""
    found = {one.step for one in saved if keep.every_steps and one.step % keep.every_steps == 0}
    if keep.every_s is None:
        return found
    last = None
    for one in saved:
        if last is None or one.written_at - last >= keep.every_s:
            found.add(one.step)
            last = one.written_at
    return found
