"""Which old checkpoints may go. Pure decisions: nothing here touches the disk.

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
    """What stays.

    Attributes:
        last: so many of the newest, the best one counted in; None: all. With 1 that can make two: newest and best.
        every_steps: beyond the limit, the checkpoints of multiples of so many steps.
        every_s: beyond the limit, the oldest, and then the first that is so many seconds younger than the last kept.
    """

    last: int | None = None
    every_steps: int | None = None
    every_s: float | None = None


def to_remove(saved: Iterable[Saved], keep: Keep, *, newest: int, best: int | None = None) -> set[int]:
    """Steps whose checkpoints may be deleted after a save.

    Args:
        saved: the checkpoints of this run, and of no other.
        newest: the step that was just saved.
        best: step of the best checkpoint.
    """
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
    """Steps, oldest first, that stay for good. A later answer holds the same ones, so none is missed."""
    found = {one.step for one in saved if keep.every_steps and one.step % keep.every_steps == 0}
    if keep.every_s is None:
        return found
    last = None
    for one in saved:
        if last is None or one.written_at - last >= keep.every_s:
            found.add(one.step)
            last = one.written_at
    return found
