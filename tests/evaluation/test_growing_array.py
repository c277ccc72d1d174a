"""One growing array: right in any order of lengths, moved block by block, in a file where memory is short."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from trainwright.errors import DataError
from trainwright.evaluation import nested_collector
from trainwright.evaluation.nested_collector import ArrayStorage, GrowingArray, NestedCollector

WIDTHS = {
    "equal": [3, 3, 3, 3],
    "rising": [1, 2, 5, 9],
    "falling": [9, 5, 2, 1],
    "late": [2, 2, 2, 40],
    "early": [40, 2, 2, 2],
    "up and down": [4, 9, 4, 8],
}


def batches(widths: list[int]) -> list[Any]:
    """Two dimensions that differ, the second the other way round."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=(3, w, widths[-1 - i])).astype(np.float32) for i, w in enumerate(widths)]


def expected(parts: list[Any]) -> Any:
    widths = np.max([part.shape for part in parts], axis=0)
    full = np.full((sum(map(len, parts)), *widths[1:]), -100, dtype=np.float32)
    row = 0
    for part in parts:
        full[row : row + len(part), : part.shape[1], : part.shape[2]] = part
        row += len(part)
    return full


@pytest.mark.parametrize("share", [1.0, 0.0], ids=["memory", "file"])
@pytest.mark.parametrize("known", [12, None, 5, 20])
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 24])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_any_order_of_lengths(
    widths: list[int], block_bytes: int, known: int | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nested_collector, "BLOCK_BYTES", block_bytes)
    parts = batches(widths)
    collected = GrowingArray(known, ArrayStorage(share=share))
    for part in parts:
        collected.add(part)
    result = collected.result()
    assert type(result) is np.ndarray
    assert result.flags.c_contiguous
    assert np.array_equal(result, expected(parts))


def test_growing_takes_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 MB become 240: while rows move, the memory of those that have moved is given back."""
    monkeypatch.setattr(nested_collector, "BLOCK_BYTES", 1 << 20)
    peak = 0
    copy = nested_collector._blocks

    def watched(array: Any, num: int) -> Any:
        class Blocks(list[Any]):
            def __reversed__(self) -> Any:
                nonlocal peak
                moved = 0  # of the new array, of which only rows that were written take memory
                for first, last in super().__reversed__():
                    yield first, last
                    moved += (last - first) * 1500 * array.itemsize
                    peak = max(peak, array.nbytes + moved)

        return Blocks(copy(array, num))

    monkeypatch.setattr(nested_collector, "_blocks", watched)
    collected = GrowingArray(40_001, ArrayStorage(share=1.0))
    for _ in range(40):
        collected.add(np.ones((1000, 1000), dtype=np.float32))
    collected.add(np.ones((1, 1500), dtype=np.float32))
    assert 0 < peak < 1.15 * collected.result().nbytes


# -- files -----------------------------------------------------------------------------------------------------------


def files_of_this_process(folder: Path) -> list[str]:
    return [one.path for one in psutil.Process().memory_maps(grouped=False) if str(folder) in one.path]


def test_a_large_result_is_in_a_file_that_is_deleted_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nested_collector, "available_bytes", lambda: 10_000)
    collector = NestedCollector(1000, storage=ArrayStorage(share=0.5, folder=str(tmp_path)))
    for start in range(0, 1000, 100):
        collector.add({"small": np.zeros(100, np.int8), "large": np.arange(start, start + 100.0)})
    result = collector.result()
    assert np.array_equal(result["large"], np.arange(1000.0))
    assert len(files_of_this_process(tmp_path)) == 1, "the large one; the small one fits"
    assert os.listdir(tmp_path) == [], "nobody has to remove it"
    assert len(caplog.records) == 1
    assert "preprocess_logits_for_metrics" in caplog.text
    del result, collector
    assert files_of_this_process(tmp_path) == []


def test_what_earlier_arrays_will_take_counts() -> None:
    storage = ArrayStorage(share=1.0)
    storage._left_bytes = 1000
    first = storage.empty((900,), np.int8)
    second = storage.empty((900,), np.int8)
    assert (type(first), type(second)) == (np.ndarray, np.memmap)
    storage.give_back(first)
    assert type(storage.empty((900,), np.int8)) is np.ndarray


@pytest.mark.parametrize(
    ("first", "second"),
    [((np.ones(2), np.ones(2)), np.ones(2)), (np.ones(2), (np.ones(2),)), ({"a": np.ones(2)}, {"b": np.ones(2)})],
    ids=["tuple and array", "array and tuple", "dicts"],
)
def test_batches_of_other_parts_are_named(first: Any, second: Any) -> None:
    collector = NestedCollector(4)
    collector.add(first)
    with pytest.raises(DataError, match=r"eval_do_concat_batches=False"):
        collector.add(second)


def test_parts_that_not_every_batch_has_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    collector = NestedCollector(6)
    a = np.ones(2)
    b = np.zeros(2)
    c = np.full(2, 5.0)
    for batch in ({"x": a, "parts": (a, b, c)}, {"x": a, "parts": (b, c), "y": b}, {"x": a, "parts": (c, a, b)}):
        collector.add(batch)
    found = collector.result()
    assert found.keys() == {"x", "parts"}
    assert [part.tolist() for part in found["parts"]] == [[1, 1, 0, 0, 5, 5], [0, 0, 5, 5, 1, 1]]
    assert caplog.text.count("Parts missing in a batch are dropped") == 1
