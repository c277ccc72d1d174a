"""Collects an evaluation's nested batches of tensors into one nested array; each array is a `GrowingArray`."""

from __future__ import annotations

import logging
import math
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright._types import IGNORE_INDEX, Nested
from trainwright.errors import DataError
from trainwright.evaluation.sample_lists import SampleList, decide_lists, is_open, join_parts, map_results
from trainwright.support.host import available_bytes
from trainwright.support.tensor_tree import iterate_tensors, map_nested, nested_detach, nested_numpify

logger = logging.getLogger(__name__)


class NestedCollector:
    """Collects values of one kind (predictions, labels, ...) over the batches of an evaluation.

    Lists with an entry for each sample come as `SampleList` and are appended; plain lists are joined by place.
    """

    def __init__(
        self,
        num_samples: int | None,
        *,
        concat: bool = True,
        move_every: int | None = None,
        storage: ArrayStorage | None = None,
    ) -> None:
        self._num_samples = num_samples  # rows to expect; None where unknown
        self._concat = concat  # one array for all batches; False keeps a list with one entry for each batch
        self._move_every = move_every  # batches after which results are moved off the device; None: all at the end
        self._storage = ArrayStorage(share=1.0) if storage is None else storage  # allocates the arrays; None: in memory
        self._waiting: deque[Nested] = deque()
        self._open: deque[Nested] = deque()  # arrays beside a list that batches to come decide about
        self._batches: list[Nested] = []  # without concatenation
        self._store: Nested = None  # nested Rows with it
        self._has_warned = False

    def add(self, batch: Nested) -> None:
        """Adds the values of a batch; they are detached."""
        self._waiting.append(nested_detach(batch))
        on_device = any(leaf.device.type != "cpu" for leaf in iterate_tensors(batch))
        if not on_device or (self._move_every is not None and len(self._waiting) >= self._move_every):
            self._move()

    def result(self) -> Nested:
        """Returns the collected arrays, nested as the batches were; None if nothing was added."""
        self._move(is_end=True)
        if not self._concat:
            return self._batches or None
        if self._store is None:
            return None
        return map_results(lambda rows: rows if isinstance(rows, SampleList) else rows.result(), self._store)

    def _move(self, *, is_end: bool = False) -> None:
        while self._waiting:
            self._open.append(nested_numpify(self._waiting.popleft()))
        while self._open and (is_end or not is_open(self._open[0])):
            arrays = nested_numpify(decide_lists(self._open.popleft()))
            if not self._concat:
                self._batches.append(arrays)
                continue
            if self._store is None:
                self._store = map_results(self._empty_rows, arrays)
            self._store = self._joined(self._store, arrays)

    def _empty_rows(self, leaf: Nested) -> GrowingArray | SampleList:
        return SampleList() if isinstance(leaf, SampleList) else GrowingArray(self._num_samples, self._storage)

    def _joined(self, store: Nested, arrays: Nested) -> Nested:
        """Adds a batch to the store; returns the parts of it that the batch has too."""
        if isinstance(store, GrowingArray) and not isinstance(arrays, (list, tuple, Mapping)):
            store.add(arrays)
            return store
        if isinstance(store, SampleList) and isinstance(arrays, SampleList):
            store.extend(arrays)
            return store
        is_mapping = isinstance(store, Mapping)
        is_array = isinstance(store, GrowingArray)
        is_alike = isinstance(arrays, Mapping if is_mapping else (list, tuple)) and not is_array
        is_alike = is_alike and isinstance(store, SampleList) == isinstance(arrays, SampleList)
        if not is_alike or (is_mapping and store.keys() - arrays.keys()):
            before = "an array" if is_array else _named(store)
            now = _named(arrays)
            raise DataError(
                f"A batch of results is {now} where earlier ones were {before}; they cannot be joined. Leave parts "
                "out with ignore_keys, or set eval_do_concat_batches=False to get a list."
            )
        if len(store) != len(arrays) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A batch of results has %d parts where earlier ones had %d. Parts missing in a batch are dropped; set "
                "eval_do_concat_batches=False to get all, as a list.",
                len(arrays),
                len(store),
            )
        if is_mapping:
            for key in store:
                store[key] = self._joined(store[key], arrays[key])
            return store
        parts = [self._joined(part, array) for part, array in zip(store, arrays, strict=False)]
        return type(store)(*parts) if hasattr(store, "_fields") else type(store)(parts)


def _named(parts: Nested) -> str:
    if isinstance(parts, SampleList):
        return "a list with an entry for each sample"
    of = f" of {', '.join(map(str, parts))}" if isinstance(parts, Mapping) else ""
    return "an array" if isinstance(parts, np.ndarray) else f"a {type(parts).__name__}{of}"


def gather_results(value: object, gather_objects: Callable[[Nested], list[Nested]]) -> Nested:
    """Gathers a nested value of all processes as objects; arrays are joined by rows."""
    if value is None:
        return None
    on_cpu = map_nested(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
    return join_parts(gather_objects(on_cpu))


# -- one array that is filled row by row -------------------------------------------------------------------------------


Array = npt.NDArray[Any]  # any dtype that a model returns


class ArrayStorage:
    """Makes arrays for the results of one evaluation, in memory or in an unnamed file that its last array deletes.

    Pages are only taken as rows are written, so memory promised to earlier arrays counts as taken.
    """

    def __init__(self, *, share: float, folder: str | None = None) -> None:
        # share of the free memory, in [0, 1]; arrays beyond it go to files
        self._left_bytes = share * available_bytes()
        # folder of these files; if it does not exist, the system's folder for temporary files
        self._folder = folder if folder is not None and Path(folder).is_dir() else None
        self._has_told = False

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocates an array without content, in memory or in a file."""
        dtype = np.dtype(dtype)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes <= self._left_bytes or size_bytes == 0 or dtype.hasobject:
            self._left_bytes -= size_bytes
            return np.empty(shape, dtype=dtype)
        if not self._has_told:
            logger.warning(
                "The results of this evaluation need %.1f GB and little more than %.1f GB of memory are free: they go "
                "to a temporary file in %s. preprocess_logits_for_metrics, or a metric with update() and compute(), "
                "keeps less.",
                size_bytes / 1e9,
                max(self._left_bytes, 0) / 1e9,
                self._folder or tempfile.gettempdir(),
            )
        self._has_told = True
        with tempfile.TemporaryFile(prefix=".trainwright-results-", dir=self._folder) as file:
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)

    def give_back(self, array: Array) -> None:
        """Counts the memory of an array as free again."""
        if not isinstance(array, np.memmap):
            self._left_bytes += array.nbytes


BLOCK_BYTES = 1 << 24


class GrowingArray:
    """Array of rows of one kind (logits, labels, ...), filled row by row, in linear time and without a second copy.

    It is allocated once when the number of rows is known. A batch that is longer in some dimension makes it grow by
    half, so that a rising series of lengths costs a constant number of copies; at the end it is cut to the used part.
    Both are done block by block, and each block's memory is given back when it has been moved. What no batch reached
    is -100.
    """

    def __init__(self, num_rows: int | None, storage: ArrayStorage) -> None:
        self._expected = num_rows
        self._storage = storage
        self._array: Any = None  # numpy's array or memmap; None before the first rows
        self._widths: tuple[int, ...] = ()
        self._num = 0
        self._is_padded = False

    def add(self, rows: npt.ArrayLike) -> None:
        """Appends an array of shape (rows, ...); another number of dimensions than before is a DataError."""
        rows = np.atleast_1d(np.asarray(rows))
        if self._array is None:
            self._widths = rows.shape[1:]
            self._array = self._storage.empty((max(self._expected or 0, len(rows)), *self._widths), rows.dtype)
        if rows.ndim != self._array.ndim:
            raise DataError(
                f"A batch of results has {rows.ndim} dimensions {rows.shape} where earlier ones had "
                f"{self._array.ndim}; they cannot be one array. Set eval_do_concat_batches=False to get them as a list."
            )
        widths = tuple(map(max, self._widths, rows.shape[1:]))
        last = self._num + len(rows)
        self._is_padded |= not widths == self._widths == rows.shape[1:]
        self._make_room(last, widths, rows.dtype)
        self._widen(widths)
        if rows.shape[1:] != widths:
            self._array[_region(self._num, last, widths)] = IGNORE_INDEX
        self._array[_region(self._num, last, rows.shape[1:])] = rows
        self._num = last

    def result(self) -> Array:
        """Returns the array, cut to the rows that were added. Nothing may be added afterwards."""
        array: Array = self._array
        shape = (self._num, *self._widths)
        if array.shape == shape:
            return np.asarray(array)
        flat = array.reshape(-1)
        size = int(np.prod(shape))
        if array.shape[1:] != self._widths:  # rows move forward, so none is overwritten before it has moved
            row_size = int(np.prod(self._widths))
            for first, last in _blocks(array, self._num):
                block = array[_region(first, last, self._widths)].copy()
                flat[first * row_size : last * row_size] = block.reshape(-1)
        if isinstance(array, np.memmap):
            return np.asarray(flat[:size]).reshape(shape)
        del flat
        array.resize(shape, refcheck=False)
        return array

    def _make_room(self, num: int, widths: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Makes the array large enough, and of a type that holds both the old rows and the new ones."""
        have = self._array.shape
        dtype = np.promote_types(self._array.dtype, dtype)
        if self._is_padded and dtype.kind in "bu":  # these have no -100
            dtype = np.promote_types(dtype, np.int8)
        need = (num, *widths)
        if dtype == self._array.dtype and all(n <= size for n, size in zip(need, have, strict=True)):
            return
        shape = tuple(size if n <= size else max(n, size * 3 // 2) for n, size in zip(need, have, strict=True))
        larger = self._storage.empty(shape, dtype)
        old = self._array
        self._storage.give_back(old)
        for first, last in reversed(_blocks(old, self._num)):
            moved = _region(first, last, self._widths)
            larger[moved] = old[moved]
            if not isinstance(old, np.memmap):
                old.resize((first, *old.shape[1:]), refcheck=False)
        self._array = larger

    def _widen(self, widths: tuple[int, ...]) -> None:
        """Pads earlier rows to the new widths."""
        for axis, (before, now) in enumerate(zip(self._widths, widths, strict=True)):
            if before < now:
                inner = map(slice, widths[:axis])
                outer = map(slice, self._widths[axis + 1 :])
                region = (slice(self._num), *inner, slice(before, now), *outer)
                self._array[region] = IGNORE_INDEX
        self._widths = widths


def _region(first: int, last: int, widths: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the index of rows from `first` to before `last`, up to `widths` in the other dimensions."""
    return (slice(first, last), *map(slice, widths))


def _blocks(array: Array, num: int) -> list[tuple[int, int]]:
    """Cuts the first `num` rows into pieces of some megabytes."""
    size = max(1, BLOCK_BYTES // max(1, array.nbytes // max(1, len(array))))
    return [(first, min(first + size, num)) for first in range(0, num, size)]
