"""A row on a side, from the start to the end of its training."""

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .golden import Golden
from .rows import Row
from .sides import OURS, REFERENCE, Outcome, Side, assert_same

# BERT and T5 ignore the number of items that they are told; transformers adds up their means.
SAME_SUMS = {"loss_weighting": "original"}


def trainer_of(row: Row, side: Side, output_dir: Path, **settings: Any) -> Any:
    """A new trainer on a new model: built from one seed, so every trainer of a row starts from the same weights."""
    model = None if row.model_from_init else row.task.build(row.dropout)
    parts = row.task.parts(model) | row.parts(model)
    if row.model_from_init:
        parts["model_init"] = row.model_from_init
    dataset = row.wrap(row.task.items(row.size))
    # Whatever ran before must not matter: a trainer seeds for itself.
    torch.manual_seed(987)
    same = SAME_SUMS if side.name == OURS.name else {}
    return side.make(model, output_dir, same | row.settings() | settings, train_dataset=dataset, **parts)


def train(row: Row, side: Side, **settings: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as output_dir:
        return side.train(trainer_of(row, side, Path(output_dir), **settings))


def assert_same_as_the_original(row: Row, golden: Golden) -> None:
    ours = train(row, OURS)
    golden.check(row.id, partial(assert_same, ours))


def originals(family: str, rows: Iterable[Row]) -> Golden:
    """The results of the original on these rows."""
    return Golden(family, {row.id: partial(train, row, REFERENCE) for row in rows})
