"""Collecting an evaluation's results: nested batches of tensors into one nested array, in linear time.

An array is allocated once when the number of samples is known. A batch that is longer in some dimension (sequences of
another length) makes the array grow by half, so that a rising series of lengths costs a constant number of copies; at
the end it is cut to what was used. What a batch does not reach is -100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainwright.errors import DataError
from trainwright.types import IGNORE_INDEX


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to every leaf of nested lists, tuples and mappings."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_nested(function, item) for item in value)
    if isinstance(value, Mapping):
        return type(value)({key: map_nested(function, item) for key, item in value.items()})  # type: ignore[call-arg]
    return function(value)


def nested_detach(tensors: Any) -> Any:
    return map_nested(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tensors)


def nested_numpify(tensors: Any) -> Any:
    """Tensors as numpy arrays; bfloat16, which numpy lacks, as float32."""
    return map_nested(_numpy, tensors)


def find_batch_size(tensors: Any) -> int | None:
    """The first dimension of the first tensor or array in a nested value."""
    if isinstance(tensors, Mapping):
        tensors = list(tensors.values())
    if isinstance(tensors, (list, tuple)):
        return next((size for size in map(find_batch_size, tensors) if size is not None), None)
    return int(tensors.shape[0]) if getattr(tensors, "ndim", 0) >= 1 else None


class Collector:
    """Collects one thing (predictions, labels, ...) over the batches of an evaluation.

    Args:
        num_samples: rows to expect; None where unknown.
        concat: one array for all batches; False keeps a list with one entry for each batch.
        move_every: batches after which results are moved off the device; None: all at the end.
    """

    def __init__(self, num_samples: int | None, *, concat: bool = True, move_every: int | None = None) -> None:
        self._num_samples = num_samples
        self._concat = concat
        self._move_every = move_every
        self._waiting: list[Any] = []
        self._batches: list[Any] = []  # without concatenation
        self._store: Any = None  # nested _Rows with it

    def add(self, batch: Any) -> None:
        self._waiting.append(nested_detach(batch))
        on_device = any(leaf.device.type != "cpu" for leaf in _tensors(batch))
        if not on_device or (self._move_every is not None and len(self._waiting) >= self._move_every):
            self._move()

    def result(self) -> Any:
        """The collected arrays, nested as the batches were; None if nothing was added."""
        self._move()
        if not self._concat:
            return self._batches or None
        return None if self._store is None else map_nested(lambda rows: rows.result(), self._store)

    def _move(self) -> None:
        for batch in self._waiting:
            arrays = nested_numpify(batch)
            if not self._concat:
                self._batches.append(arrays)
                continue
            if self._store is None:
                self._store = map_nested(lambda _: _Rows(self._num_samples), arrays)
            _add_nested(self._store, arrays)
        self._waiting = []


class _Rows:
    """One array that fills up row by row."""

    def __init__(self, num_rows: int | None) -> None:
        self._expected = num_rows
        self._array: np.ndarray[Any, Any] | None = None
        self._used: list[int] = []
        self._is_padded = False

    def add(self, rows: Any) -> None:
        rows = np.atleast_1d(np.asarray(rows))
        if self._array is None:
            shape = (max(self._expected or len(rows), len(rows)), *rows.shape[1:])
            self._array = np.empty(shape, dtype=rows.dtype)
            self._used = [0, *rows.shape[1:]]
        if rows.ndim != self._array.ndim:
            raise DataError(
                f"A batch of results has {rows.ndim} dimensions {rows.shape} where earlier ones had "
                f"{self._array.ndim}; they cannot be one array. Set eval_do_concat_batches=False to get them as a list."
            )
        self._is_padded |= tuple(self._used[1:]) != rows.shape[1:]
        first, last = self._used[0], self._used[0] + len(rows)
        self._used = [last, *map(max, self._used[1:], rows.shape[1:])]
        self._make_room(rows.dtype)
        if self._is_padded:
            self._array[first:last] = IGNORE_INDEX
        where = (slice(first, last), *map(slice, rows.shape[1:]))
        self._array[where] = rows

    def result(self) -> Any:
        assert self._array is not None
        view = self._array[tuple(map(slice, self._used))]
        return view if view.base is None or view.shape == self._array.shape else np.ascontiguousarray(view)

    def _make_room(self, dtype: Any) -> None:
        assert self._array is not None
        have, dtype = self._array.shape, np.promote_types(self._array.dtype, dtype)
        if self._is_padded and dtype.kind in "bu":  # these have no -100
            dtype = np.promote_types(dtype, np.int8)
        if dtype == self._array.dtype and all(n <= size for n, size in zip(self._used, have, strict=True)):
            return
        shape = tuple(size if n <= size else max(n, size * 3 // 2) for n, size in zip(self._used, have, strict=True))
        larger = np.full(shape, IGNORE_INDEX, dtype=dtype) if self._is_padded else np.empty(shape, dtype=dtype)
        larger[tuple(map(slice, have))] = self._array
        self._array = larger


def _add_nested(store: Any, arrays: Any) -> None:
    if isinstance(store, _Rows):
        store.add(arrays)
    elif isinstance(store, Mapping):
        for key in store:
            _add_nested(store[key], arrays[key])
    else:
        for part, array in zip(store, arrays, strict=True):
            _add_nested(part, array)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_nested(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found


def _numpy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.cpu()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()
