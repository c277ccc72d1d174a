"""GPT-2 and every causal model that declares no loss type: where we differ from the original, on purpose.

The original counts `num_items_in_batch` over the shifted labels only where the model's `loss_type` says that its loss
shifts. GPT-2 does not say so, yet its loss shifts: so the first label of each sequence, which is never a target, enters
the divisor, and loss and gradient come out too small by (S-1)/S, S being the length. Ours counts over the shifted
labels: the logged loss is the model's own. This is a documented difference; here it is measured, on both sides, so that
a correction in transformers shows as a failure of the second test.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from . import models
from .golden import MARKS, Golden
from .rows import Row, Task
from .run import assert_same_as_the_original, originals, train, trainer_of
from .sides import OURS, REFERENCE, Outcome, differing

pytestmark = MARKS

LENGTH = 8


def sequences(size: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, models.VOCAB, (LENGTH,), generator=g).tolist() for _ in range(size)]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


GPT2 = Task("gpt2", models.gpt2, sequences)


SIZES = [(1, 1), (4, 1), (1, 4), (4, 4)]  # batch, accumulation


def one_step(batch: int, accumulation: int) -> Row:
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    return Row(GPT2, f"{batch}-x-{accumulation}", settings | {"train_sampling_strategy": "sequential", "max_steps": 1})


def own_loss(batch: int) -> float:
    ids = torch.tensor([item["input_ids"] for item in sequences(26)[:batch]])
    with torch.no_grad():
        return GPT2.build(0.0)(input_ids=ids, labels=ids).loss.item()


CORRECTED = Row(GPT2, "corrected", {"gradient_accumulation_steps": 2}, dropout=0.2)


def with_the_divisor_put_right() -> Outcome:
    with TemporaryDirectory() as folder:
        corrected = trainer_of(CORRECTED, REFERENCE, Path(folder))
        corrected._loss_shifts_labels = True
        return REFERENCE.train(corrected)


ONE_STEP = originals("gpt2", [one_step(*sizes) for sizes in SIZES])
GOLDEN = Golden("gpt2_corrected", {CORRECTED.id: with_the_divisor_put_right})


@pytest.mark.parametrize(("batch", "accumulation"), SIZES)
def test_the_logged_loss_is_the_models_own(batch: int, accumulation: int) -> None:
    loss = train(one_step(batch, accumulation), OURS).losses()[0]
    assert loss == pytest.approx(own_loss(batch * accumulation), rel=1e-6)


@pytest.mark.parametrize(("batch", "accumulation"), SIZES)
def test_the_original_is_off_by_one_position(batch: int, accumulation: int) -> None:
    share = (LENGTH - 1) / LENGTH
    loss = ONE_STEP.result(one_step(batch, accumulation).id).losses()[0]
    assert loss == pytest.approx(own_loss(batch * accumulation) * share, rel=1e-6)


def test_accumulating_four_times_two_is_one_batch_of_eight() -> None:
    settings = {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.5}
    sizes = [{"per_device_train_batch_size": n, "gradient_accumulation_steps": 8 // n} for n in (2, 8)]
    results = [train(Row(GPT2, "windows", settings | size, size=32), OURS) for size in sizes]
    assert max(differing(results[0].weights, results[1].weights).values(), default=0.0) < 1e-6
    assert results[0].losses() == pytest.approx(results[1].losses(), rel=1e-6)


def test_with_the_divisor_put_right_the_original_has_our_weights() -> None:
    """Nothing else differs: told that the loss shifts, the original ends with the same weights and the same log."""
    assert_same_as_the_original(CORRECTED, GOLDEN)
