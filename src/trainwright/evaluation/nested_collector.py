"""Collects an evaluation's nested batches of tensors into one nested array; each array is a `GrowingArray`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
import torch

from trainwright._types import Nested
from trainwright.errors import DataError
from trainwright.evaluation.growing_array import ArrayStorage, GrowingArray
from trainwright.tensor_tree import map_nested, nested_concat, nested_detach, nested_numpify, tensors_of


class NestedCollector:
    """Collects values of one kind (predictions, labels, ...) over the batches of an evaluation."""

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
        self._batches: list[Nested] = []  # without concatenation
        self._store: Nested = None  # nested Rows with it

    def add(self, batch: Nested) -> None:
        """Adds the values of a batch; they are detached."""
        self._waiting.append(nested_detach(batch))
        on_device = any(leaf.device.type != "cpu" for leaf in tensors_of(batch))
        if not on_device or (self._move_every is not None and len(self._waiting) >= self._move_every):
            self._move()

    def result(self) -> Nested:
        """Returns the collected arrays, nested as the batches were; None if nothing was added."""
        self._move()
        if not self._concat:
            return self._batches or None
        return None if self._store is None else map_nested(lambda rows: rows.result(), self._store)

    def _move(self) -> None:
        while self._waiting:
            arrays = nested_numpify(self._waiting.popleft())
            if not self._concat:
                self._batches.append(arrays)
                continue
            if self._store is None:
                self._store = map_nested(lambda _: GrowingArray(self._num_samples, self._storage), arrays)
            _add_nested(self._store, arrays)


def _add_nested(store: Nested, arrays: Nested) -> None:
    if isinstance(store, GrowingArray):
        store.add(arrays)
    elif isinstance(store, Mapping):
        _check_same_parts(sorted(map(str, store)), sorted(map(str, arrays)))
        for key in store:
            _add_nested(store[key], arrays[key])
    else:
        _check_same_parts([str(len(store))], [str(len(arrays))])
        for part, array in zip(store, arrays, strict=True):
            _add_nested(part, array)


def _check_same_parts(before: list[str], now: list[str]) -> None:
    if before != now:
        raise DataError(
            f"A batch of results has the parts {', '.join(now)} where earlier ones had {', '.join(before)}; they "
            "cannot be joined. Leave one out with ignore_keys, or set eval_do_concat_batches=False to get a list."
        )


def gather_results(value: object, gather_objects: Callable[[Nested], list[Nested]]) -> Nested:
    """Gathers a nested value of all processes: lists have an entry for each sample and are joined, tensors by rows."""
    if value is None:
        return None
    return joined(
        gather_objects(map_nested(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value))
    )


def joined(values: list[Nested]) -> Nested:
    """Joins values of the same structure, one of each process."""
    first = values[0]
    if isinstance(first, list):
        return [entry for one in values for entry in one]
    if isinstance(first, tuple):
        return tuple(joined(list(parts)) for parts in zip(*values, strict=True))
    if isinstance(first, Mapping):
        return {key: joined([one[key] for one in values]) for key in first}
    return reduce(nested_concat, values) if isinstance(first, (torch.Tensor, np.ndarray)) else first
