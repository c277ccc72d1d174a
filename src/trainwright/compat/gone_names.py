"""Names that older scripts import from transformers' trainer and that mean nothing today. Using one warns."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any

from trainwright.errors import LegacyNameWarning


class _ShardedDDPOption(str, Enum):
    """Words of `sharded_ddp`, for FairScale."""

    SIMPLE = "simple"
    ZERO_DP_2 = "zero_dp_2"
    ZERO_DP_3 = "zero_dp_3"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


def _space_of_sigopt(trial: object) -> list[dict[str, Any]]:
    """The default space as SigOpt took it."""
    rates = {"name": "learning_rate", "type": "double", "bounds": {"min": 1e-6, "max": 1e-4}, "transformation": "log"}
    numbers = {"num_train_epochs": (1, 6), "seed": (1, 40)}
    sizes = {
        "name": "per_device_train_batch_size",
        "type": "categorical",
        "categorical_values": ["4", "8", "16", "32", "64"],
    }
    whole = [{"name": n, "type": "int", "bounds": {"min": low, "max": high}} for n, (low, high) in numbers.items()]
    return [rates, *whole, sizes]


_NAMES = {
    "ShardedDDPOption": (_ShardedDDPOption, "FairScale is not used; write fsdp=True"),
    "default_hp_space_sigopt": (_space_of_sigopt, "SigOpt was shut down in 2024; search with backend='optuna'"),
}


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value, reason = _NAMES[name]
    warnings.warn(f"{name} has no effect: {reason}.", LegacyNameWarning, stacklevel=4)
    return value
