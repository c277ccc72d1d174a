"""Random seeds of loader workers."""

from __future__ import annotations

import os
import random
import signal

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


def start_worker(worker_id: int, seeds: dict[str, int]) -> None:
    """First thing in a worker: seeds it, and leaves signals to the main process, which still needs its batches."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if seeds:
        seed_worker(worker_id, **seeds)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seeds everything and makes torch deterministic, at the price of speed; CUDA needs the two variables set early."""
    set_seed(seed)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
