"""The original's small functions and its container: the same results, nested or not, in any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import trainer_pt_utils as theirs
from transformers import trainer_utils as also_theirs

import trainwright as ours

A = torch.arange(6.0).reshape(2, 3)
B = torch.arange(8.0).reshape(2, 4)
VALUES: dict[str, tuple[Any, Any]] = {
    "equal": (A, A + 1),
    "ragged": (A, B),
    "shorter": (B, A),
    "numbers": (torch.tensor(1), torch.tensor(2)),
    "deep": (torch.ones(1, 2, 3), torch.zeros(2, 4, 3)),
    "nested": ((A, [B, {"x": A}]), (B, [A, {"x": B}])),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one.dtype == other.dtype and np.array_equal(one, other))


@pytest.mark.parametrize("as_arrays", [False, True])
@pytest.mark.parametrize("padding", [-100, 0])
@pytest.mark.parametrize("pair", VALUES.values(), ids=VALUES.keys())
def test_nested_concat(pair: tuple[Any, Any], padding: int, as_arrays: bool) -> None:
    one, other = map(ours.nested_numpify, pair) if as_arrays else pair
    assert equal(ours.nested_concat(one, other, padding), theirs.nested_concat(one, other, padding))


@pytest.mark.parametrize(("one", "other"), [(A, A.numpy()), ([A], (A,)), ("a", "b")])
def test_what_cannot_be_joined(one: Any, other: Any) -> None:
    for side in (ours, theirs):
        with pytest.raises((AssertionError, TypeError)):
            side.nested_concat(one, other)


def test_padding_functions_and_truncation() -> None:
    assert equal(ours.torch_pad_and_concatenate(A, B), theirs.torch_pad_and_concatenate(A, B))
    one = A.numpy()
    other = B.numpy()
    assert equal(ours.numpy_pad_and_concatenate(one, other, 7), theirs.numpy_pad_and_concatenate(one, other, 7))
    nested = VALUES["nested"][0]
    assert equal(ours.nested_truncate(nested, 1), theirs.nested_truncate(nested, 1))


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_the_container(joins: bool, moves: bool) -> None:
    results = []
    for side in (ours, theirs):
        container = side.EvalLoopContainer(do_nested_concat=joins, padding_index=-1)
        assert container.get_arrays() is None
        for pair in (VALUES["nested"], VALUES["nested"][::-1]):
            for batch in pair:
                container.add(batch)
            if moves:
                container.to_cpu_and_numpy()
                assert container.tensors is None
        results.append(container.get_arrays())
    assert equal(*results)


def test_denumpify_detensorize() -> None:
    value = {"a": np.float32(0.5), "b": (torch.tensor([2]), [np.int64(3)]), "c": torch.ones(2), "d": "text"}
    mine = ours.denumpify_detensorize(value)
    other = also_theirs.denumpify_detensorize(value)
    assert str(mine) == str(other)
    assert type(mine["a"]) is float
