"""What every optimizer that runs on a CPU obeys, whichever package it comes from: one table, the same laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import TrainerCallback
from trainwright.errors import ArgumentError
from trainwright.optim.optimizer_table import OPTIMIZERS
from trainwright.support import model_modes

from .._support.small import StopAt
from ..parity.sides import REFERENCE, differing, weights
from .table import EVERY_NAME, OURS_ALONE, ROWS, Net, Row, Silent, losses, make_trainer, seeded, sentences

pytestmark = pytest.mark.costly

every = pytest.mark.parametrize("row", ROWS, ids=str)
DECAYING = {"embed.weight", "body.weight", "head.weight"}


def test_every_name_has_a_row() -> None:
    assert sorted(EVERY_NAME) == sorted(OPTIMIZERS)
    assert len(OPTIMIZERS) == 41 + len(OURS_ALONE)


def total_loss(trainer: Any) -> float:
    model_modes.eval_mode(trainer.model, trainer.optimizer)
    batch = torch.utils.data.default_collate(sentences())
    with torch.no_grad():
        return float(trainer.model(**batch)["loss"])


@every
def test_it_reduces_the_loss(row: Row, tmp_path: Path) -> None:
    row.needs()
    trainer = make_trainer(tmp_path, row, num_train_epochs=6)
    before = total_loss(trainer)
    trainer.train()
    assert total_loss(trainer) < 0.7 * before


@pytest.mark.slow  # its kernels are compiled, which takes most of a minute
@pytest.mark.parametrize("row", [row for row in ROWS if row.module == "torchao"], ids=str)
def test_low_bit_compiled_it_reduces_the_loss(row: Row, tmp_path: Path) -> None:
    test_it_reduces_the_loss(row, tmp_path)


@every
def test_interrupted_and_resumed_is_uninterrupted(row: Row, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit, through a checkpoint that holds plain tensors and numbers; dropout and all. Nothing is unusual."""
    row.needs()
    settings: dict[str, Any] = {"num_train_epochs": 2, "weight_decay": 0.1 if row.decays else 0.0}
    whole = make_trainer(tmp_path / "whole", row, net=lambda: Net(0.2), **settings)
    whole.train()
    first = make_trainer(tmp_path / "parts", row, net=lambda: Net(0.2), callbacks=[StopAt(5)], **settings)
    first.train()
    second = make_trainer(tmp_path / "parts", row, net=lambda: Net(0.2), **settings)
    caplog.clear()
    second.train(resume_from_checkpoint=True)
    assert not [text for text in caplog.messages if "optimizer" in text]
    assert losses(second) == losses(whole)
    assert differing(weights(second.model), weights(whole.model)) == {}


@pytest.mark.parametrize(
    "row",
    [  # of the others the law above, which resumes too, says the same
        pytest.param(
            row, id=str(row), marks=() if str(row).startswith(("schedule_free", "adamw_torch")) else pytest.mark.slow
        )
        for row in ROWS
    ],
)
def test_a_resume_right_after_an_evaluation_is_exact_too(row: Row, tmp_path: Path) -> None:
    """Schedule-free optimizers train on other weights than they evaluate on."""
    row.needs()
    rhythm = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings: dict[str, Any] = {**rhythm, "eval_dataset": sentences(4)}
    whole = make_trainer(tmp_path / "whole", row, **settings)
    whole.train()
    first = make_trainer(tmp_path / "parts", row, callbacks=[StopAt(4)], **settings)
    first.train()
    second = make_trainer(tmp_path / "parts", row, **settings)
    second.train(resume_from_checkpoint=True)
    assert differing(weights(second.model), weights(whole.model)) == {}


@every
def test_decay_moves_what_decays_and_nothing_else(row: Row, tmp_path: Path) -> None:
    row.needs()
    before = weights(seeded(Silent))
    # RAdam waits five steps before it moves anything
    trainer = make_trainer(tmp_path, row, net=Silent, max_steps=6, weight_decay=0.3)
    trainer.train()
    after = weights(trainer.model)
    moved = set(differing(after, before))
    assert moved == (DECAYING if row.decays else set())
    for name in moved:
        assert 0.1 < (after[name] / before[name]).median() < 1


@every
def test_without_decay_nothing_moves_by_itself(row: Row, tmp_path: Path) -> None:
    row.needs()
    before = weights(seeded(Silent))
    trainer = make_trainer(tmp_path, row, net=Silent, max_steps=2)
    trainer.train()
    assert differing(weights(trainer.model), before) == {}


class GradientNorms(TrainerCallback):
    """The norm of the gradients that the optimizer is about to use."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        self.seen.append(float(torch.stack(norms).norm()) if norms else 0.0)


@every
def test_accumulated_batches_are_one_batch(row: Row, tmp_path: Path) -> None:
    row.needs()
    if row.in_backward:
        with pytest.raises(ArgumentError, match="gradient_accumulation_steps=2"):
            make_trainer(tmp_path, row, gradient_accumulation_steps=2).train()
        return
    settings: dict[str, Any] = {"max_steps": 3}
    one = make_trainer(tmp_path, row, per_device_train_batch_size=8, **settings)
    two = make_trainer(tmp_path, row, gradient_accumulation_steps=2, **settings)
    one.train()
    two.train()
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)


@every
def test_gradients_are_clipped_before_it_steps(row: Row, tmp_path: Path) -> None:
    """Where the update is part of the backward pass there is nothing left to clip, and the step goes on."""
    row.needs()
    norms = GradientNorms()
    trainer = make_trainer(tmp_path, row, max_grad_norm=0.01, max_steps=3, callbacks=[norms])
    trainer.train()
    assert norms.seen == pytest.approx(3 * [0.0 if row.in_backward else 0.01], rel=1e-3)


# Why ours differ from transformers' on purpose.
BETTER = {"galore_adafactor_layerwise": "transformers' cannot be made: it is given a rate and relative_step"}


@pytest.mark.framework
@every
def test_the_weights_are_those_of_transformers(row: Row, tmp_path: Path) -> None:
    row.needs()
    if row.name in OURS_ALONE or row.name in BETTER:
        pytest.skip(BETTER.get(row.name, "transformers has none of that name"))
    settings: dict[str, Any] = {"num_train_epochs": 2}
    if row.name.endswith("_layerwise"):  # transformers' schedule moves the rate of a stand-in, not of these
        settings["lr_scheduler_type"] = "constant"
    ours = make_trainer(tmp_path / "ours", row, **settings)
    ours.train()
    theirs = make_trainer(tmp_path / "theirs", row, REFERENCE, **settings)
    theirs.train()
    assert losses(ours) == losses(theirs)
    assert differing(weights(ours.model), weights(theirs.model)) == {}
