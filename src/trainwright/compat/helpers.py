"""Helpers of the original that nothing of ours calls: lists of checkpoints; the others are its own.

And names that older scripts import from it and that mean nothing today: using one warns.
"""

from __future__ import annotations

import importlib
import re
import shutil
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

from trainwright._types import PREFIX_CHECKPOINT_DIR
from trainwright.checkpoint.store import Keep, Saved, to_remove
from trainwright.errors import LegacyNameWarning

SAME_TIME_S = 1.0  # file systems that keep no times show directories as made at once


def sort_checkpoints(
    output_dir: str,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Lists the directories of checkpoints, oldest first.

    Args:
        output_dir: directory that holds them.
        checkpoint_prefix: their names are this prefix and a number.
        use_mtime: sort by modification time, if the file system supports it; default: by number.
        best_model_checkpoint: the best checkpoint; if it is not the newest, it is placed just before the newest.

    Returns:
        Their paths.
    """
    pattern = re.compile(rf"{re.escape(checkpoint_prefix)}-(\d+)")
    folder = Path(output_dir)
    matches = {path: pattern.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    found = {path: int(match[1]) for path, match in matches.items() if match and path.is_dir()}
    order = sorted(found, key=lambda path: found[path])
    times = {path: path.stat().st_mtime for path in order}
    if use_mtime and order and max(times.values()) - min(times.values()) >= SAME_TIME_S:
        order.sort(key=lambda path: times[path])
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    if best in order[:-1]:
        order.remove(best)
        order.insert(-1, best)
    return [str(path) for path in order]


def rotate_checkpoints(
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
) -> None:
    """Deletes the oldest checkpoints beyond a limit, whoever wrote them; never the newest nor the best.

    Args:
        output_dir: directory that holds them.
        save_total_limit: number of checkpoints that stay; None, 0 or less: all.
        best_model_checkpoint: path of the best one.
        use_mtime: as for `sort_checkpoints`.
        checkpoint_prefix: as for `sort_checkpoints`.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    order = [Path(path) for path in sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)]
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    places = [Saved(place) for place in range(len(order))]
    best_place = order.index(best) if best in order else None
    for place in to_remove(places, Keep(last=save_total_limit), newest=len(order) - 1, best=best_place):
        shutil.rmtree(order[place], ignore_errors=True)


# Module of transformers -> names that only it has, since nothing here needs them.
OF_TRANSFORMERS = {
    "integrations": ("is_optuna_available", "is_ray_available", "is_ray_tune_available"),
    "integrations.neftune": ("activate_neftune",),
    "trainer_pt_utils": (
        "DistributedLengthGroupedSampler",
        "DistributedSamplerWithLoop",
        "EvalLoopContainer",
        "IterableDatasetShard",
        "ShardSampler",
        "distributed_broadcast_scalars",
        "distributed_concat",
        "nested_truncate",
        "torch_distributed_zero_first",
    ),
    "trainer_utils": (
        "default_hp_space_optuna",
        "default_hp_space_ray",
        "default_hp_space_wandb",
        "find_executable_batch_size",
        "load_sharded_checkpoint",
        "number_of_arguments",
    ),
}


# Words of `sharded_ddp`, for FairScale.
_ShardedDDPOption = Enum(
    "_ShardedDDPOption",
    {
        "SIMPLE": "simple",
        "ZERO_DP_2": "zero_dp_2",
        "ZERO_DP_3": "zero_dp_3",
        "OFFLOAD": "offload",
        "AUTO_WRAP": "auto_wrap",
    },
    type=str,
)


def _sigopt_space(trial: object) -> list[dict[str, Any]]:
    """The default space as SigOpt took it."""
    rates = {"name": "learning_rate", "type": "double", "bounds": {"min": 1e-6, "max": 1e-4}, "transformation": "log"}
    numbers = {"num_train_epochs": (1, 6), "seed": (1, 40)}
    whole = [{"name": n, "type": "int", "bounds": {"min": low, "max": high}} for n, (low, high) in numbers.items()]
    sizes = {"type": "categorical", "categorical_values": ["4", "8", "16", "32", "64"]}
    return [rates, *whole, {"name": "per_device_train_batch_size", **sizes}]


GONE = {
    "ShardedDDPOption": (_ShardedDDPOption, "FairScale is not used; write fsdp=True"),
    "default_hp_space_sigopt": (_sigopt_space, "SigOpt was shut down in 2024; search with backend='optuna'"),
}


def __getattr__(name: str) -> Any:  # a class or a function of transformers, or a name of earlier versions
    if name in GONE:
        value, reason = GONE[name]
        warnings.warn(f"{name} has no effect: {reason}.", LegacyNameWarning, stacklevel=4)
        return value
    for module, names in OF_TRANSFORMERS.items():
        if name in names:
            return getattr(importlib.import_module(f"transformers.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
