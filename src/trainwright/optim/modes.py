"""Training and evaluation mode of a model and of optimizers that have such modes (schedule-free ones)."""

from __future__ import annotations

from typing import Any


def train_mode(model: Any, optimizer: Any) -> None:
    model.train()
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


def eval_mode(model: Any, optimizer: Any) -> None:
    if callable(getattr(model, "eval", None)):
        model.eval()
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
