"""Gathers results that are no tensors of one shape (boxes in images, texts), as Python objects over processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
import torch

from trainwright._types import Nested
from trainwright.tensor_tree import map_nested, nested_concat


def gather_results(value: object, gather_objects: Callable[[Nested], list[Nested]]) -> Nested:
    """Gathers a nested value of all processes: lists have an entry for each sample and are joined, tensors along rows.

    Args:
        value: of this process.
        gather_objects: collects an object of each process, by rank.
    """
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
