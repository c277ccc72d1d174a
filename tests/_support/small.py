"""Small real things: a trainer that learns in a second, data that keeps a diary or draws at random, comparisons."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from trainwright import TrainerCallback
from trainwright.checkpoint import rng
from trainwright.checkpoint.manifest import Manifest, describe_files

from ..parity import data as data
from ..parity import models as models
from ..parity.sides import OURS as OURS
from ..parity.sides import REFERENCE as REFERENCE
from ..parity.sides import Side as Side
from ..parity.sides import differing as differing
from ..parity.sides import weights as weights
from ..parity.sides import without_clock as without_clock

Item = dict[str, Any]
NUM_SAMPLES = 26  # batches of 4: seven in an epoch, the last one of 2

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "seed": 11,
}


def make_trainer(output_dir: Path | str, side: Side = OURS, cls: Any = None, **parts: Any) -> Any:
    """A trainer on the CPU; what is no part of a trainer is a setting. By default a plain module with dropout."""
    names = (
        "model",
        "model_init",
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "processing_class",
        "callbacks",
        "compute_metrics",
        "compute_loss_func",
        "optimizers",
        "optimizer_cls_and_kwargs",
        "preprocess_logits_for_metrics",
    )
    given = {name: parts.pop(name) for name in names if name in parts}
    if "model" not in given and "model_init" not in given:
        given["model"] = module()
    given.setdefault("model", None)
    given.setdefault("train_dataset", data.vectors(NUM_SAMPLES))
    chosen = side if cls is None else Side(side.name, cls, side.arguments)
    return chosen.make(output_dir=Path(output_dir), settings=SETTINGS | parts, **given)


def module(dropout: float = 0.2, kind: Callable[[float], nn.Module] = models.ReturnsDict) -> nn.Module:
    """The same weights at every call."""
    return models.seeded(lambda: kind(dropout))


def train(trainer: Any, **how: Any) -> Any:
    return OURS.train(trainer, **how)


def trained_trainer(output_dir: Path | str, *, resume: Any = None, **parts: Any) -> Any:
    """A trainer of `make_trainer` after its training, which may resume a checkpoint."""
    trainer = make_trainer(output_dir, **parts)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    """The values of one name in the log, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def losses(trainer: Any) -> list[float]:
    return logged(trainer, "loss")


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def sign_again(folder: Path, *, without: tuple[str, ...] = ()) -> None:
    """Whoever altered the checkpoint wrote its manifest too; `without`: entries that the cursor loses."""
    manifest = Manifest.read(folder)
    assert manifest is not None
    values = {name: getattr(manifest, name) for name in ("step", "run_id", "cursor")}
    if manifest.cursor is not None:
        values["cursor"] = {name: value for name, value in manifest.cursor.items() if name not in without}
    Manifest(**values, files=describe_files(folder)).write(folder)


def as_version_0_1(folder: Path) -> None:
    """Gives a checkpoint the layout of version 0.1: the data position among the random states, no kind of order."""
    position = folder / "data_position.pth"
    where = torch.load(position) if position.is_file() else {}
    states = rng.load(folder / "rng_state.pth")
    states |= {"loader_stream": where.get("stream"), "loader_own": where.get("dataloader")}
    rng.save(folder / "rng_state.pth", states)
    position.unlink(missing_ok=True)
    sign_again(folder, without=("order",))


class StopAt(TrainerCallback):
    """Saves and stops when a step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class Diary(Dataset[Item]):
    """Remembers which samples were read, in order."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        self.reads.append(int(index))
        return self.items[index]


def noise(size: int) -> torch.Tensor:
    """From each of the three generators of a process, as augmentations draw."""
    parts = [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]
    return torch.tensor(parts).repeat(size // 3 + 1)[:size] / 3


def augmented(item: Item) -> Item:
    return {**item, "x": item["x"] + noise(len(item["x"]))}


class Augmented(Dataset[Item]):
    """Another sample at each read."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return augmented(self.items[index])


class AugmentedStream(IterableDataset[Item]):
    def __init__(self, items: list[Item]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Item]:
        return map(augmented, self.items)
