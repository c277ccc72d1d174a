"""LossRule: the worked example of its file, and what holds for any window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.support.loss_normalization import LossRule

IGNORED = -100
NUMBER = torch.tensor(7)


def labels(*rows: list[int]) -> dict[str, Any]:
    return {"labels": torch.tensor(rows)}


def applied(rule: LossRule, loss: torch.Tensor, num_items: Any, batch: Any = None, *, share: float = 1.0) -> float:
    return rule.apply(loss, batch or {}, num_items, micro_batches=2, share=share).item()


# -- the worked example: 3 and 1 label tokens, losses (1, 2, 3) and (6) ----------------------------------------------

PER_TOKEN = ([1.0, 2.0, 3.0], [6.0])


def test_counted_losses_add_up_to_the_mean_over_tokens() -> None:
    rule = LossRule(counts_items=True)
    window = [labels([5, 6, 7]), labels([5, IGNORED, IGNORED])]
    count = rule.count(window)
    assert count is not None
    assert count.item() == 4
    losses = [torch.tensor(sum(tokens)) / count for tokens in PER_TOKEN]
    assert sum(applied(rule, loss, count) for loss in losses) == 3.0


def test_means_are_averaged_over_the_micro_batches() -> None:
    rule = LossRule()
    means = [torch.tensor(tokens).mean() for tokens in PER_TOKEN]
    assert sum(applied(rule, mean, None) for mean in means) == 4.0


def test_means_weighted_by_their_items_make_the_mean_over_tokens() -> None:
    rule = LossRule(weights_items=True)
    window = [labels([5, 6, 7]), labels([5, IGNORED, IGNORED])]
    count = rule.count(window)
    assert count is not None
    means = [torch.tensor(tokens).mean() for tokens in PER_TOKEN]
    assert sum(applied(rule, mean, count, batch) for mean, batch in zip(means, window, strict=True)) == 3.0


def test_an_auxiliary_loss_is_weighted_by_the_share_of_samples() -> None:
    """A balance loss of 4 and 8, coefficient 0.5, in micro-batches of 3 samples and of 1."""
    rule = LossRule(aux_coefficient=0.5)
    parts = [(4.0, 0.75), (8.0, 0.25)]
    losses = [
        rule.weigh_auxiliary(torch.tensor(1.0 + 0.5 * aux), {"aux_loss": torch.tensor(aux)}, sample_share=share)
        for aux, share in parts
    ]
    assert sum(loss.item() for loss in losses) == 2.0 + 0.5 * (4.0 * 0.75 + 8.0 * 0.25)
    assert rule.weigh_auxiliary(torch.tensor(1.0), (torch.tensor(1.0),), sample_share=0.5).item() == 1.0


# -- count -----------------------------------------------------------------------------------------------------------

COUNTS: list[tuple[str, dict[str, Any], list[dict[str, Any]], int | None]] = [
    ("all labels", {}, [labels([1, 2, 3], [4, 5, 6])], 6),
    ("ignored ones are no items", {}, [labels([1, IGNORED, 3], [IGNORED] * 3)], 2),
    ("over all micro-batches", {}, [labels([1, 2]), labels([3, IGNORED]), labels([IGNORED, IGNORED])], 3),
    ("of several lengths", {}, [labels([1, 2]), labels([3, 4, 5])], 5),
    ("label 0 is no target of a causal loss", {"shifts_labels": True}, [labels([1, 2, 3], [4, IGNORED, 6])], 3),
    ("an ignored first label changes nothing", {"shifts_labels": True}, [labels([IGNORED, 2, 3])], 2),
    ("one token is no pair", {"shifts_labels": True}, [labels([1])], 0),
    ("classes", {}, [{"labels": torch.tensor([0, 2, IGNORED])}], 2),
    (
        "shifted by the collator",
        {"shifts_labels": True},
        [{"labels": torch.tensor([[1, 2, 3]]), "shift_labels": torch.tensor([[2, 3, IGNORED]])}],
        2,
    ),
    ("no labels", {}, [{"x": torch.ones(2)}], None),
    ("labels that are no tensor", {}, [{"labels": [{"boxes": torch.ones(2)}]}], None),
    ("an empty window", {}, [], None),
    ("nobody asks", {"counts_items": False}, [labels([1, 2])], None),
]


@pytest.mark.parametrize(("settings", "window", "expected"), [case[1:] for case in COUNTS], ids=[c[0] for c in COUNTS])
def test_count(settings: dict[str, Any], window: list[dict[str, Any]], expected: int | None) -> None:
    count = LossRule(**{"counts_items": True} | settings).count(window)
    assert (None if count is None else count.item()) == expected


@given(st.lists(st.lists(st.sampled_from([IGNORED, 1, 2]), min_size=2, max_size=6), min_size=1, max_size=5))
def test_a_window_has_the_items_of_its_micro_batches(rows: list[list[int]]) -> None:
    for shifts in (False, True):
        rule = LossRule(counts_items=True, shifts_labels=shifts)
        count = rule.count([labels(row) for row in rows])
        assert count is not None
        assert count.item() == sum(label != IGNORED for row in rows for label in row[shifts:])
        assert count.ndim == 0


# -- apply -----------------------------------------------------------------------------------------------------------

HALF = 0.5
WHOLE = 1.0
APPLIED: list[tuple[str, dict[str, Any], torch.Tensor | None, float]] = [
    ("a mean", {}, None, HALF),
    ("a mean though items are known", {}, NUMBER, HALF),
    ("a counted loss", {"counts_items": True}, NUMBER, WHOLE),
    ("a model that counts, and nothing to count", {"counts_items": True}, None, HALF),
    ("a loss function of the user's", {"counts_items": True, "has_loss_func": True}, NUMBER, WHOLE),
    ("a loss function of the user's, nothing to count", {"counts_items": True, "has_loss_func": True}, None, WHOLE),
    ("said to be scaled", {"is_scaled": True}, None, WHOLE),
    ("said to be no scaled one", {"is_scaled": False, "counts_items": True}, NUMBER, HALF),
    ("said to be no scaled one, with a loss function", {"is_scaled": False, "has_loss_func": True}, NUMBER, HALF),
]


@pytest.mark.parametrize(("settings", "num_items", "share"), [c[1:] for c in APPLIED], ids=[c[0] for c in APPLIED])
def test_apply(settings: dict[str, Any], num_items: torch.Tensor | None, share: float) -> None:
    rule = LossRule(**settings)
    loss = torch.tensor(3.0)
    assert applied(rule, loss, num_items) == 3.0 * share
    assert rule.apply(loss, {}, num_items, micro_batches=1, share=1.0) is loss
    if share == HALF:  # a part of a micro-batch that did not fit weighs as many samples as it has
        assert applied(rule, loss, num_items, share=0.25) == 3.0 * 0.25 / 2


# -- processes that average their gradients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "num_items", "factor"),
    [
        ({"counts_items": True, "num_processes": 4}, NUMBER, 4),
        ({"counts_items": True, "num_processes": 4}, None, 1),
        ({"counts_items": True, "num_processes": 1}, NUMBER, 1),
        ({"counts_items": False, "num_processes": 4}, NUMBER, 1),
    ],
)
def test_undo_averaging(settings: dict[str, Any], num_items: torch.Tensor | None, factor: int) -> None:
    assert LossRule(**settings).undo_averaging(torch.tensor(3.0), {}, num_items).item() == 3.0 * factor


# -- the weight of an evaluation batch -------------------------------------------------------------------------------

FLOATS = {"labels": torch.tensor([0.5, 1.5])}
WEIGHTS: list[tuple[str, dict[str, Any], dict[str, Any], list[str], int]] = [
    ("classes", {}, {"labels": torch.tensor([0, 1, 2])}, ["labels"], 3),
    ("tokens", {}, labels([1, IGNORED, 3], [4, 5, IGNORED]), ["labels"], 4),
    ("tokens of a causal loss", {"shifts_labels": True}, labels([1, IGNORED, 3], [4, 5, IGNORED]), ["labels"], 2),
    ("nothing but ignored ones", {}, labels([IGNORED, IGNORED]), ["labels"], 0),
    ("numbers", {}, FLOATS, ["labels"], 2),
    ("no labels", {}, {"x": torch.ones(2, 3)}, ["labels"], 2),
    ("no names", {}, labels([1, 2], [3, IGNORED]), [], 3),
    (
        "a span's ends",
        {},
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
        ["start_positions", "end_positions"],
        2,
    ),
]


@pytest.mark.parametrize(
    ("settings", "batch", "names", "expected"), [case[1:] for case in WEIGHTS], ids=[case[0] for case in WEIGHTS]
)
def test_weight(settings: dict[str, Any], batch: dict[str, Any], names: list[str], expected: int) -> None:
    assert int(LossRule(**settings).weight(batch, names, 2)) == expected


def test_an_auxiliary_loss_is_scaled_neither_by_processes_nor_by_micro_batches() -> None:
    """Two processes, a window of four micro-batches: what is averaged and added up is one auxiliary loss."""
    rule = LossRule(counts_items=True, num_processes=2, aux_coefficient=0.5)
    counted = torch.tensor(3.0)
    auxiliary = torch.tensor(0.8)
    outputs = {"aux_loss": auxiliary}
    loss = rule.undo_averaging(counted + 0.5 * auxiliary, outputs, torch.tensor(7))
    assert loss.item() == pytest.approx(2 * 3.0 + 0.4)
    assert rule.weigh_auxiliary(loss, outputs, sample_share=0.25).item() == pytest.approx(2 * 3.0 + 0.1)
    assert rule.weigh_auxiliary(loss, (loss,), sample_share=0.25) is loss
