"""Collecting results: what numpy's concatenation with padding gives, in linear time and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright import find_batch_size, nested_detach, nested_numpify
from trainwright.errors import DataError
from trainwright.evaluation import nested_collector
from trainwright.evaluation.nested_collector import NestedCollector

PAD = -100
NUMERIC = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8]


@st.composite
def batches(draw: st.DrawFn) -> list[torch.Tensor]:
    """Batches of one number of dimensions, each of its own size in all of them."""
    ndim = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(NUMERIC))
    shapes = draw(st.lists(st.tuples(st.integers(1, 4), *[st.integers(0, 6)] * ndim), min_size=1, max_size=7))
    start = 0
    made = []
    for shape in shapes:
        size = int(np.prod(shape))
        made.append((torch.arange(start, start + size) % 100).reshape(shape).to(dtype))
        start += size
    return made


def padded(parts: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    arrays = [part.numpy() for part in parts]
    widths = [max(array.shape[d] for array in arrays) for d in range(1, arrays[0].ndim)]
    full = [
        np.pad(a, [(0, 0), *((0, w - n) for w, n in zip(widths, a.shape[1:], strict=True))], constant_values=PAD)
        for a in arrays
    ]
    return np.concatenate(full)


@given(batches(), st.sampled_from(["known", "unknown", "too few", "too many"]), st.none() | st.integers(1, 3))
def test_as_numpy_concatenates(parts: list[torch.Tensor], knowledge: str, move_every: int | None) -> None:
    rows = sum(len(part) for part in parts)
    known = {"known": rows, "unknown": None, "too few": max(1, rows // 2), "too many": rows + 5}[knowledge]
    collector = NestedCollector(known, move_every=move_every)
    for part in parts:
        collector.add(part)
    expected = padded(parts)
    result = collector.result()
    assert result.dtype == expected.dtype
    assert np.array_equal(result, expected)
    assert result.flags.c_contiguous


@given(st.data())
def test_nested_in_any_way(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))

    def batch(size: int, width: int) -> Any:
        row = torch.arange(size * width).reshape(size, width)
        return (row, {"a": [row * 2.0], "b": row[:, 0]})

    widths = [data.draw(st.integers(1, 4)) for _ in sizes]
    collector = NestedCollector(None)
    parts = [batch(size, width) for size, width in zip(sizes, widths, strict=True)]
    for part in parts:
        collector.add(part)
    first, rest = collector.result()
    assert np.array_equal(first, padded([part[0] for part in parts]))
    assert np.array_equal(rest["a"][0], padded([part[1]["a"][0] for part in parts]))
    assert np.array_equal(rest["b"], np.concatenate([part[1]["b"].numpy() for part in parts]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("known", [None, 5])
def test_types_that_have_no_minus_one_hundred(dtype: torch.dtype, known: int | None) -> None:
    """Nothing has to be padded, so nothing can overflow."""
    collector = NestedCollector(known)
    parts = [torch.tensor([1, 0, 1]).to(dtype), torch.tensor([0, 1]).to(dtype)]
    for part in parts:
        collector.add(part)
    result = collector.result()
    assert result.tolist() == [*parts[0].tolist(), *parts[1].tolist()]
    assert result.dtype == parts[0].numpy().dtype


def test_bfloat16_becomes_float32() -> None:
    collector = NestedCollector(2)
    collector.add(torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16))
    assert (collector.result().dtype, collector.result().tolist()) == (np.float32, [[1.5], [2.5]])


def test_a_wider_type_that_comes_later_keeps_its_values() -> None:
    collector = NestedCollector(3)
    for part in (torch.tensor([1], dtype=torch.int32), torch.tensor([2**40]), torch.tensor([0.5])):
        collector.add(part)
    assert collector.result().tolist() == [1, 2**40, 0.5]


def test_numbers_without_a_batch_dimension() -> None:
    collector = NestedCollector(None)
    for value in (1.0, 2.0):
        collector.add(torch.tensor(value))
    assert collector.result().tolist() == [1.0, 2.0]


def test_without_concatenation_there_is_one_entry_for_each_batch() -> None:
    collector = NestedCollector(9, concat=False)
    for size in (2, 3):
        collector.add({"a": torch.ones(size, size)})
    assert [batch["a"].shape for batch in collector.result()] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("concat", [True, False])
def test_nothing_is_none(concat: bool) -> None:
    assert NestedCollector(3, concat=concat).result() is None


def test_another_number_of_dimensions_is_named() -> None:
    collector = NestedCollector(None)
    collector.add(torch.ones(2, 3))
    with pytest.raises(DataError, match=r"1 dimensions \(2,\).*2.*eval_do_concat_batches=False"):
        collector.add(torch.ones(2))


def test_kept_tensors_are_not_views_of_the_input() -> None:
    """A model may write into its output again."""
    output = torch.ones(2, 2)
    collector = NestedCollector(None)
    collector.add(output)
    output.zero_()
    assert collector.result().tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_no_graph_is_kept() -> None:
    collector = NestedCollector(2, concat=False)
    weight = torch.ones(2, requires_grad=True)
    collector.add(weight * 2)
    assert collector.result()[0].tolist() == [2.0, 2.0]


# -- how much is copied ----------------------------------------------------------------------------------------------


class Counts:
    """Elements that were newly allocated by `np.full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated: list[int] = []
        full = np.full
        empty = np.empty

        def counted(function: Any) -> Any:
            def call(shape: Any, *args: Any, **kwargs: Any) -> Any:
                self.allocated.append(int(np.prod(shape)))
                return function(shape, *args, **kwargs)

            return call

        monkeypatch.setattr(nested_collector.np, "full", counted(full))
        monkeypatch.setattr(nested_collector.np, "empty", counted(empty))


@pytest.mark.parametrize("count", [8, 64])
def test_with_a_known_number_of_rows_there_is_one_allocation(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    collector = NestedCollector(count * 4)
    for _ in range(count):
        collector.add(torch.ones(4, 5))
    collector.result()
    assert counts.allocated == [count * 4 * 5]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rising", [True, False])
def test_memory_is_a_constant_times_the_result(known: bool, rising: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows unknown, or each batch longer than the one before: still linear."""
    totals = []
    for count in (40, 160, 320):
        counts = Counts(monkeypatch)
        collector = NestedCollector(count * 2 if known else None)
        for i in range(count):
            collector.add(torch.ones(2, i + 1 if rising else 3))
        size = collector.result().size
        totals.append(sum(counts.allocated) / size)
        monkeypatch.undo()
    assert max(totals) < 7, "a growth by half in two dimensions: at most 2.25 times too large, and 3 times copied"


# -- the small functions ---------------------------------------------------------------------------------------------

SIZES: list[tuple[Any, int | None]] = [
    ({"a": torch.ones(3, 2)}, 3),
    ([torch.tensor(1.0), torch.ones(4)], 4),
    ({"a": "text", "b": {"c": (torch.ones(2),)}}, 2),
    (np.ones((5, 1)), 5),
    ({"a": 1, "b": "x"}, None),
    ([], None),
    (torch.tensor(1.0), None),
]


@pytest.mark.parametrize(("value", "expected"), SIZES, ids=range(len(SIZES)))
def test_find_batch_size(value: Any, expected: int | None) -> None:
    assert find_batch_size(value) == expected


def test_detaching_and_numpifying_keep_the_shape() -> None:
    weight = torch.ones(2, requires_grad=True)
    value = {"a": (weight * 2, [weight * 3]), "b": "text", "c": None}
    detached = nested_detach(value)
    assert not detached["a"][0].requires_grad
    assert not detached["a"][1][0].requires_grad
    arrays = nested_numpify(detached)
    assert isinstance(arrays["a"][0], np.ndarray)
    assert (arrays["b"], arrays["c"]) == ("text", None)
