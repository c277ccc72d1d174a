"""The label smoother against transformers', and against the formula it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother as Original

from trainwright import LabelSmoother

IGNORED = -100


def case(*shape: int, classes: int = 7, ignored: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(*shape, classes, generator=generator)
    labels = torch.randint(classes, shape, generator=generator)
    labels.view(-1)[:ignored] = IGNORED
    return {"logits": logits, "loss": torch.tensor(0.0)}, labels


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("shape", "shift"), [((5,), False), ((3, 4), False), ((3, 4), True), ((2, 9), True)], ids=str)
@pytest.mark.parametrize("ignored", [0, 2])
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(11)], ids=["mean", "int", "tensor"])
def test_as_transformers(epsilon: float, shape: tuple[int, ...], ignored: int, num_items: Any, shift: bool) -> None:
    output, labels = case(*shape, ignored=ignored)
    arguments: dict[str, Any] = {"shift_labels": shift, "num_items_in_batch": num_items}
    ours = LabelSmoother(epsilon)(output, labels.clone(), **arguments)
    theirs = Original(epsilon)(output, labels.clone(), **arguments)
    assert torch.equal(ours, theirs)


def test_it_leaves_the_labels_as_they_were() -> None:
    output, labels = case(3, 4, ignored=2)
    before = labels.clone()
    LabelSmoother(0.1)(output, labels)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_as_torch_smooths(epsilon: float) -> None:
    output, labels = case(6, 5, ignored=4)
    torchs = nn.functional.cross_entropy(
        output["logits"].flatten(0, 1), labels.flatten(), label_smoothing=epsilon, ignore_index=IGNORED
    )
    torch.testing.assert_close(LabelSmoother(epsilon)(output, labels), torchs)


def test_parts_of_a_window_add_up_to_the_whole() -> None:
    output, labels = case(8, 5, ignored=9)
    smoother = LabelSmoother(0.2)
    count = (labels != IGNORED).sum()
    parts = [
        smoother({"logits": output["logits"][i : i + 2]}, labels[i : i + 2], num_items_in_batch=count)
        for i in range(0, 8, 2)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), smoother(output, labels))


def test_another_ignored_label_and_a_tuple() -> None:
    output, labels = case(4, 3, ignored=2)
    other = torch.where(labels == IGNORED, 3, labels)
    labels = torch.where(labels == 3, IGNORED, labels)
    ours = LabelSmoother(0.1, ignore_index=3)((output["logits"],), other)
    assert torch.equal(ours, LabelSmoother(0.1)(output, torch.where(other == 3, IGNORED, other)))


def test_half_precision_over_many_classes_does_not_overflow() -> None:
    """The sum over 60,000 classes is beyond what fp16 holds."""
    logits = torch.zeros(1, 60_000, dtype=torch.float16)
    loss = LabelSmoother(0.5)({"logits": logits}, torch.tensor([1]))
    assert loss.item() == pytest.approx(torch.tensor(60_000.0).log().item(), rel=1e-2)
