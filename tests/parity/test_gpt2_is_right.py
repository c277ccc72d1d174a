"""GPT-2 and every causal model that declares no loss type: where we differ from the original, on purpose.

The original counts `num_items_in_batch` over the shifted labels only where the model's `loss_type` says that its loss
shifts. GPT-2 does not say so, yet its loss shifts: so the first label of each sequence, which is never a target, enters
the divisor, and loss and gradient come out too small by (S-1)/S, S being the length. Ours counts over the shifted
labels: the logged loss is the model's own. This is a documented difference; here it is measured, on both sides, so that
a correction in transformers shows as a failure of the second test.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from . import models
from .rows import BASE, Row, Task
from .run import trainer_of
from .sides import OURS, REFERENCE, Side, differing

LENGTH = 8


def sequences(size: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, models.VOCAB, (LENGTH,), generator=g).tolist() for _ in range(size)]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


GPT2 = Task("gpt2", models.gpt2, sequences)


def first_loss(side: Side, output_dir: Path, batch: int, accumulation: int) -> float:
    row = Row(GPT2, "one-step", {"train_sampling_strategy": "sequential", "max_steps": 1})
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    return side.train(trainer_of(row, side, output_dir, **settings)).losses()[0]


def own_loss(batch: int) -> float:
    ids = torch.tensor([item["input_ids"] for item in sequences(26)[:batch]])
    with torch.no_grad():
        return GPT2.build(0.0)(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (4, 1), (1, 4), (4, 4)])
def test_the_logged_loss_is_the_models_own(batch: int, accumulation: int, tmp_path: Path) -> None:
    assert first_loss(OURS, tmp_path, batch, accumulation) == pytest.approx(own_loss(batch * accumulation), rel=1e-6)


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (4, 4)])
def test_the_original_is_off_by_one_position(batch: int, accumulation: int, tmp_path: Path) -> None:
    share = (LENGTH - 1) / LENGTH
    expected = own_loss(batch * accumulation) * share
    assert first_loss(REFERENCE, tmp_path, batch, accumulation) == pytest.approx(expected, rel=1e-6)


def test_accumulating_four_times_two_is_one_batch_of_eight(tmp_path: Path) -> None:
    row = Row(GPT2, "windows", {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.5}, size=32)
    results = [
        OURS.train(
            trainer_of(row, OURS, tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch)
        )
        for batch in (2, 8)
    ]
    assert max(differing(results[0].weights, results[1].weights).values(), default=0.0) < 1e-6
    assert results[0].losses() == pytest.approx(results[1].losses(), rel=1e-6)


def test_with_the_divisor_put_right_the_original_has_our_weights(tmp_path: Path) -> None:
    """Nothing else differs: told that the loss shifts, the original ends with the same weights and the same log."""
    row = Row(GPT2, "corrected", BASE | {"gradient_accumulation_steps": 2}, dropout=0.2)
    corrected = trainer_of(row, REFERENCE, tmp_path / "theirs")
    corrected._loss_shifts_labels = True
    theirs = REFERENCE.train(corrected)
    ours = OURS.train(trainer_of(row, OURS, tmp_path / "ours"))
    assert ours.log == theirs.log
    assert differing(ours.weights, theirs.weights) == {}
