"""Random seeds of loader workers."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seeds `random`, numpy and torch on all devices; `deterministic` also asks torch for deterministic algorithms."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seeds a worker process from the seed that torch gave it, apart from the workers of other ranks."""
    set_seed((torch.initial_seed() % 2**32 + num_workers * rank) % 2**32)


class SeededIndices(list[int]):
    """Indices of a batch that seed the worker to which they are sent.

    They are seeded as they arrive, right before their samples are read: what is random in a sample or in the collator
    is then a function of (seed, epoch, batch), the same after a resume. In the main process they are a plain list.
    """

    def __init__(self, indices: Iterable[int], origin: tuple[int, int, int]) -> None:
        super().__init__(indices)
        self.origin = origin

    def __reduce__(self) -> Any:
        return _seeded_here, (list(self), self.origin)


def _seeded_here(indices: list[int], origin: tuple[int, int, int]) -> list[int]:
    """Runs where the indices are unpickled: in the worker."""
    seed_from(origin)
    return indices


def seed_from(origin: tuple[int, ...]) -> None:
    """Seeds all generators of this process with a function of some numbers."""
    set_seed(seed_of(origin))


def seed_of(origin: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence([part % 2**64 for part in origin]).generate_state(1)[0])


def start_worker(worker_id: int, seeds: dict[str, int]) -> None:
    """First thing in a worker: seeds it, and leaves signals to the main process, which still needs its batches."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if seeds:
        seed_worker(worker_id, **seeds)


GRACE_S = 0.5  # for children that end by themselves when the process does


@functools.cache
def end_workers_at_exit() -> None:
    """Workers that ignore SIGTERM would be waited for without end when this process exits: they are killed then.

    Registered later than multiprocessing's own hook, so it runs before that one, which terminates and joins them.
    """
    atexit.register(_end_children)


def _end_children() -> None:
    """Asks daemonic children to end, as multiprocessing would, and kills those that do not."""
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seeds everything and makes torch deterministic, at the price of speed; CUDA needs the two variables set early."""
    set_seed(seed)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
