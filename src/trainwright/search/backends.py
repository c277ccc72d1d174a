"""Table of search libraries: probe of the package, class of the backend, default; and transformers' default spaces."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib.util import find_spec

from trainwright._types import JSONObject
from trainwright.config.enums import HPSearchBackend
from trainwright.errors import ArgumentError, MissingPackageError
from trainwright.search.base import SearchBackend, Trial

logger = logging.getLogger(__name__)

GONE = {"sigopt": "SigOpt's service was shut down in 2024 and transformers took it out"}


def is_optuna_available() -> bool:
    return find_spec("optuna") is not None


def is_ray_available() -> bool:
    return find_spec("ray") is not None


def is_ray_tune_available() -> bool:
    return is_ray_available() and find_spec("ray.tune") is not None


# Name -> probe, module and class of the backend, and its package for pip.
BACKENDS: dict[str, tuple[Callable[[], bool], str, str, str]] = {
    "optuna": (is_optuna_available, "optuna", "OptunaBackend", "optuna"),
    "ray": (is_ray_tune_available, "ray", "RayBackend", "'ray[tune]'"),
    "wandb": (lambda: find_spec("wandb") is not None, "wandb_sweep", "WandbBackend", "wandb"),
}


def select_backend(name: object) -> tuple[HPSearchBackend, SearchBackend]:
    """Returns the backend of a name, or the first installed one for None; unknown or missing ones are errors."""
    chosen = _installed() if name is None else str(getattr(name, "value", name))
    if chosen not in BACKENDS:
        reason = f": {GONE[chosen]}" if chosen in GONE else " is no backend of a search"
        raise ArgumentError(f"backend={chosen!r}{reason}. Use {', '.join(map(repr, BACKENDS))}.")
    is_available, module, kind, package = BACKENDS[chosen]
    if not is_available():
        raise MissingPackageError(f"backend={chosen!r} needs a package that is not there: pip install {package}")
    return HPSearchBackend(chosen), getattr(importlib.import_module(f"trainwright.search.{module}"), kind)()


def _installed() -> str:
    found = [name for name, (is_available, *_) in BACKENDS.items() if is_available()]
    if not found:
        ways = ", ".join(f"pip install {package}" for *_, package in BACKENDS.values())
        raise MissingPackageError(f"A hyperparameter search needs one of these packages, and none is there: {ways}.")
    if len(found) > 1:
        logger.info("backend=%r is taken of those installed: %s.", found[0], ", ".join(found))
    return found[0]


def default_hp_space_optuna(trial: Trial) -> JSONObject:
    """Draws the parameters of a trial of Optuna.

    Args:
        trial: Optuna's trial.

    Returns:
        Values by name of argument.
    """
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_hp_space_ray(trial: Trial) -> JSONObject:
    """Returns the domains of Ray Tune.

    Args:
        trial: not used.

    Returns:
        Domains by name of argument.
    """
    from ray import tune

    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.uniform(1, 40),
        "per_device_train_batch_size": tune.choice([4, 8, 16, 32, 64]),
    }


def default_hp_space_wandb(trial: Trial) -> JSONObject:
    """Returns the configuration of a sweep of Weights & Biases.

    Args:
        trial: not used.

    Returns:
        The configuration, with `parameters` by name of argument.
    """
    return {
        "method": "random",
        "metric": {"name": "objective", "goal": "minimize"},
        "parameters": {
            "learning_rate": {"distribution": "uniform", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 6},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": [4, 8, 16, 32, 64]},
        },
    }
