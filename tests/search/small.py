"""A search that takes a second: a plain module with dropout, a learning rate and a seed to choose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
from safetensors.torch import load_file

from .._support.small import OURS, Side, data, make_trainer, module

SETTINGS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6}


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "seed": trial.suggest_int("seed", 1, 1000),
    }


def rates(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def make_module() -> Any:
    return module(0.2)


def searcher(folder: Path | str, side: Side = OURS, cls: Any = None, *, dropout: float = 0.2, **parts: Any) -> Any:
    """A trainer to search with."""
    parts.setdefault("model_init", lambda: module(dropout))
    return make_trainer(folder, side, cls, **{"eval_dataset": data.vectors(8), **SETTINGS, **parts})


def drawn(seed: int = 3) -> optuna.samplers.RandomSampler:
    return optuna.samplers.RandomSampler(seed=seed)


def saved(folder: Path) -> Any:
    """The weights of a checkpoint."""
    return load_file(folder / "model.safetensors")


def tree(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
