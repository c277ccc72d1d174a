"""A dataset with indices that changes with the epoch is told of each one, as by the original, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from trainwright import Trainer

from .._support.small import OURS, REFERENCE, StopAt, data, differing, make_trainer, trained_trainer, weights

SAMPLES = data.vectors(12)
THREE = {"num_train_epochs": 3, "save_strategy": "no", "report_to": "none"}


class Turns(Dataset[Any]):
    """Samples that are turned by the epoch; `told` has the epochs that this copy of it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def __len__(self) -> int:
        return len(SAMPLES)

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch = self.told[-1] if self.told else 0
        return {**SAMPLES[index], "x": SAMPLES[index]["x"].roll(epoch)}


class DrawsWhenTold(Turns):
    """Draws its turn from torch's generator where it is told of an epoch."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(int(torch.randint(6, ())))


@pytest.mark.framework
@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_the_samples_that_the_original_has(workers: int, tmp_path: Path) -> None:
    trained = {}
    for side in (REFERENCE, OURS):
        dataset = Turns()
        settings = THREE | {"dataloader_num_workers": workers}
        trainer = make_trainer(tmp_path / side.name, side, train_dataset=dataset, **settings)
        side.train(trainer)
        trained[side.name] = weights(trainer.model)
        assert list(dict.fromkeys(dataset.told)) == [0, 1, 2]
    assert differing(*trained.values()) == {}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded samples": {"seed_samples": True},
    "workers": {"dataloader_num_workers": 1},
    "workers that persist": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "seeded samples of workers that persist": {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "seed_samples": True,
    },
}


@pytest.mark.process
@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "step"),  # the end of an epoch, and the first step of one
    [(kind, step) for kind in (*KINDS, "draws when told") for step in (3, 4)],
)
def test_a_resumed_run_has_the_samples_of_its_epoch(kind: str, step: int, tmp_path: Path) -> None:
    make = DrawsWhenTold if kind == "draws when told" else Turns
    settings = THREE | KINDS.get(kind, {})
    whole = trained_trainer(tmp_path / "whole", train_dataset=make(), **settings)
    settings |= {"save_strategy": "steps", "save_steps": step}
    trained_trainer(tmp_path / "run", train_dataset=make(), callbacks=[StopAt(step)], **settings)
    again = trained_trainer(tmp_path / "run", train_dataset=make(), resume=True, **settings)
    assert again.state.global_step == whole.state.global_step == 9
    assert differing(weights(again.model), weights(whole.model)) == {}


class SeesEpochs(Trainer):
    """Notes of each trained sample by how much it is turned."""

    turns: list[int]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.turns += [turn_of(x) for x in inputs["x"]]
        return super().training_step(model, inputs, num_items_in_batch)


def turn_of(x: torch.Tensor) -> int:
    return next(n for n in range(6) if any(torch.equal(sample["x"].roll(n), x) for sample in SAMPLES))


@pytest.mark.parametrize(
    "kind", ["mixture", "by length", pytest.param("workers that persist", marks=pytest.mark.process)]
)
def test_a_dataset_within_another_is_told_too(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = THREE | {"train_dataset": Turns()}
    if kind == "mixture":
        settings["train_dataset"] = {"one": Turns(), "list": SAMPLES}
    elif kind == "by length":
        settings |= {"train_sampling_strategy": "group_by_length", "length_column_name": "labels"}
        settings["train_dataset"] = WithLengths()
    else:
        settings |= KINDS[kind]
    trainer = make_trainer(tmp_path, cls=SeesEpochs, **settings)
    trainer.turns = []
    trainer.train()
    per_epoch = len(trainer.turns) // 3
    seen = [set(trainer.turns[n * per_epoch : (n + 1) * per_epoch]) for n in range(3)]
    assert [turns - {0} for turns in seen] == [set(), {1}, {2}]


class WithLengths(Turns):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"input_ids": [0] * (index + 1)}
