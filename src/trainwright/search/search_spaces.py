"""Default search spaces: learning rate, epochs, seed, batch size, as in transformers."""

from __future__ import annotations

from trainwright._types import JSONObject
from trainwright.search.base import Trial


def default_hp_space_optuna(trial: Trial) -> JSONObject:
    """Draws the parameters from a trial of Optuna."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_hp_space_ray(trial: Trial) -> JSONObject:
    """Returns the domains of Ray Tune; the trial is not used."""
    from trainwright.search.ray import default_domains

    return dict(default_domains())


def default_hp_space_wandb(trial: Trial) -> JSONObject:
    """Returns the configuration of a sweep; the trial is not used."""
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
