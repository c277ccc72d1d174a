"""Training data that are not the trainer's own dataloader are read as in a loop by hand: fetch, train, fetch, train.

What such an object draws falls between the same dropout draws as in transformers, whose trainer reads no batch ahead
either: only accelerate's dataloaders do, those that the user has prepared included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright import Trainer, set_seed

from .._support.small import OURS, REFERENCE, Augmented, Side, StopAt, data, differing, make_trainer, module, weights

Batch = dict[str, torch.Tensor]
NUM_BATCHES = 7  # no multiple of 2 or 3: the last window is a short one
SETTINGS: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_strategy": "epoch",
}


def drawn() -> Batch:
    return {"x": torch.randn(4, data.FEATURES), "labels": torch.randint(data.CLASSES, (4,))}


class WithoutLength:
    """Draws its batches when it is asked for them."""

    dataset = [None] * 4 * NUM_BATCHES

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(NUM_BATCHES):
            yield drawn()


class WithLength(WithoutLength):
    def __len__(self) -> int:
        return NUM_BATCHES


class KeepsState(WithLength):
    """Continues where its state says, and begins anew only after it was asked for a batch beyond the last one."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.at < NUM_BATCHES:
            self.at += 1
            yield drawn()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Batches(list[Batch]):
    """A list of batches, made before training."""

    dataset = WithLength.dataset


def listed() -> Any:
    generator = torch.Generator().manual_seed(2)
    shape = (4, data.FEATURES)
    return Batches({"x": torch.randn(shape, generator=generator), "labels": torch.arange(4) % 3} for _ in range(7))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Augmented(data.vectors(26)))


def torchs(dataset: Any) -> Any:
    return DataLoader(dataset, batch_size=4)


KINDS: dict[str, Callable[[], Any]] = {
    "own iterable": WithLength,
    "own iterable without a length": WithoutLength,
    "with a state": KeepsState,
    "list": listed,
    "torch's": lambda: torchs(Augmented(data.vectors(26))),
    "torch's, of a stream": lambda: torchs(Stream()),
}


def trainer_of(kind: str, folder: Path, side: Side = OURS, **settings: Any) -> Any:
    class Own(side.trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return loader

    loader = KINDS[kind]()
    return make_trainer(folder, cls=Own, side=side, **SETTINGS | settings)


def weights_by_hand(kind: str, micro_batches: int, *, num_epochs: int = 2) -> Any:
    model = module()
    set_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = KINDS[kind]()
    for _ in range(num_epochs):
        batches = iter(loader)
        while window := [batch for _, batch in zip(range(micro_batches), batches, strict=False)]:
            for batch in window:
                (model(**batch)["loss"] / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_in_a_loop_by_hand(kind: str, micro_batches: int, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, gradient_accumulation_steps=micro_batches)
    trainer.train()
    assert differing(weights(trainer.model), weights_by_hand(kind, micro_batches)) == {}
    assert (trainer.state.epoch, trainer.state.max_steps) == (2.0, trainer.state.global_step)


class Prepared(Trainer):
    """Its dataloader is accelerate's, which reads one batch ahead."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(torchs(self.train_dataset))


class Wraps(Trainer):
    """Gives the batches of the trainer's dataloader on."""

    def get_train_dataloader(self) -> Any:
        inside = super().get_train_dataloader()

        class Around:
            dataset = inside.dataset

            def __len__(self) -> int:
                return len(inside)

            def __iter__(self) -> Iterator[Any]:
                yield from inside

        return Around()


@pytest.mark.framework
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "with a state"), Prepared, Wraps])
def test_they_train_as_in_transformers(kind: Any, micro_batches: int, tmp_path: Path) -> None:
    def trained(side: Side) -> Any:
        settings: dict[str, Any] = {"gradient_accumulation_steps": micro_batches}
        if kind in ("own iterable without a length", "torch's, of a stream"):
            settings["max_steps"] = NUM_BATCHES // micro_batches  # it cannot be left out there
        if isinstance(kind, str):
            trainer = trainer_of(kind, tmp_path / side.name, side, **settings)
        else:
            cls = type("Own", (side.trainer,), {"get_train_dataloader": own_loader(kind, side)})
            rows = Augmented(data.vectors(26))
            settings["num_train_epochs"] = 1  # within a wrapper, the original's dataloader repeats the order of epoch 0
            trainer = make_trainer(tmp_path / side.name, side, cls, train_dataset=rows, **SETTINGS | settings)
        trainer.train()
        return weights(trainer.model)

    assert differing(trained(OURS), trained(REFERENCE)) == {}


def own_loader(kind: Any, side: Side) -> Callable[[Any], Any]:
    """The method of a subclass of our trainer, for a subclass of either."""
    if kind is Prepared:
        return Prepared.get_train_dataloader

    def wrap(trainer: Any) -> Any:
        inside = side.trainer.get_train_dataloader(trainer)

        class Around:
            dataset = inside.dataset

            def __len__(self) -> int:
                return len(inside)

            def __iter__(self) -> Iterator[Any]:
                yield from inside

        return Around()

    return wrap


@pytest.mark.parametrize(("micro_batches", "step"), [(1, 3), (1, 7), (1, 9), (2, 2), (2, 4), (2, 5), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_continues_to_the_bit(kind: str, micro_batches: int, step: int, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": micro_batches}
    whole = trainer_of(kind, tmp_path / "whole", **settings)
    whole.train()
    trainer_of(kind, tmp_path / "cut", callbacks=[StopAt(step)], **settings).train()
    again = trainer_of(kind, tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(whole.model)) == {}
    assert (again.state.epoch, again.state.global_step) == (2.0, whole.state.global_step)


@pytest.mark.parametrize("wraps", [Prepared, Wraps])
@pytest.mark.parametrize(("micro_batches", "step"), [(1, 3), (1, 7), (1, 9), (2, 2), (2, 4), (2, 5)])
def test_so_does_one_that_reads_ahead_itself(
    wraps: type[Trainer], micro_batches: int, step: int, tmp_path: Path
) -> None:
    def trained(name: str, *callbacks: Any, resume: bool = False) -> Any:
        settings = {**SETTINGS, "gradient_accumulation_steps": micro_batches, "callbacks": [*callbacks]}
        trainer = make_trainer(tmp_path / name, cls=wraps, train_dataset=Augmented(data.vectors(26)), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer.model)

    whole = trained("whole")
    trained("cut", StopAt(step))
    assert differing(trained("cut", resume=True), whole) == {}


def test_the_last_step_of_unknown_data_is_evaluated_and_saved(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    trainer = trainer_of("own iterable without a length", tmp_path, eval_dataset=data.vectors(4), **settings)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [5, 10, 14]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-14", "checkpoint-5"]
    assert [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry] == [1.0, 2.0]
