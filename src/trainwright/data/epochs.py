"""The epoch of a dataset with indices: `set_epoch` of the user's dataset, in this process and in workers that persist.

A dataset that changes with the epoch has a method `set_epoch(epoch)`, counted from 0. It is called when the batches of
an epoch are opened, also in the middle of one after a resume, before workers are started, which copy the dataset.
Workers that persist have a copy from the first epoch: the indices that they get tell them of later ones.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

_epoch_of_worker: int | None = None  # of the indices that this worker got last


def set_epoch_of(dataset: Any, epoch: int) -> None:  # the user's own type
    """Calls `set_epoch` of a dataset that has it."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def set_epoch_in_worker(epoch: int) -> None:
    """Calls `set_epoch` of this worker's copy of the dataset where a new epoch begins; does nothing elsewhere.

    The first indices of a worker are of the epoch in which it was started, which its copy has already.
    """
    global _epoch_of_worker
    info = get_worker_info()
    if info is None:
        return
    if _epoch_of_worker is not None and _epoch_of_worker != epoch:
        set_epoch_of(info.dataset, epoch)
    _epoch_of_worker = epoch
