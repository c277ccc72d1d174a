"""Which old checkpoints may go. Pure decisions: nothing here touches the disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def to_remove(steps: Sequence[int], *, keep_last: int | None, best: int | None, owned: Collection[int]) -> set[int]:
    """Steps whose checkpoints may be deleted after a save.

    Args:
        steps: checkpoints on disk.
        keep_last: how many to keep, the best one counted in; None keeps all.
        best: step of the best checkpoint, which always stays, as does the newest one, of all and of this run. With
            `keep_last=1` that can make two.
        owned: steps that this run wrote itself; nothing else is ever deleted.
    """
    if keep_last is None or len(steps) <= keep_last:
        return set()
    newest_first = sorted(steps, reverse=True)
    keep = {newest_first[0], max(owned, default=newest_first[0])} | ({best} & set(steps) if best is not None else set())
    for step in newest_first:
        if len(keep) >= keep_last:
            break
        keep.add(step)
    return (set(steps) - keep) & set(owned)
