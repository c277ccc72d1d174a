"""Nested values: lists, tuples and mappings of tensors or arrays, as models return and collators make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainwright._types import IGNORE_INDEX


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to every leaf of nested lists, tuples and mappings; returns the same structure of results."""
    if isinstance(value, (list, tuple)):
        parts = [map_nested(function, item) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return type(value)({key: map_nested(function, item) for key, item in value.items()})  # type: ignore[call-arg]
    return function(value)


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_tensors(part)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a sharded tensor that this process has, detached and in the same memory; else the tensor."""
    tensor = tensor.detach()
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def has_finite_values(tensor: torch.Tensor, *, allows_infinity: bool = False) -> bool:
    """Returns whether this process's part of a tensor has no NaN, and no infinity unless that is allowed; waits."""
    values = local_part(tensor)
    if not values.is_floating_point() or values.numel() == 0 or values.device.type == "meta":
        return True
    try:
        # NaN if there is one; makes no copy, since memory may be short
        lowest, highest = torch.aminmax(values)
    except NotImplementedError:
        # quantized, or another type without a minimum
        return True
    if allows_infinity:
        return not math.isnan(lowest.item())
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())


def storage_place(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int]:
    """Returns a key that is equal for two tensors that begin at the same element of one storage.

    The key holds the storage, so no other storage can take its place while the key exists.
    """
    return tensor.untyped_storage(), int(tensor.storage_offset())


def nested_detach(tensors: Any) -> Any:
    """Detaches nested tensors from their graph.

    Args:
        tensors: nested value.

    Returns:
        A nested value of the same structure; leaves that are no tensors stay as they are.
    """
    return map_nested(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tensors)


def nested_numpify(tensors: Any) -> Any:
    """Converts nested tensors to numpy arrays.

    Args:
        tensors: nested value, on any device.

    Returns:
        A nested value of the same structure; bfloat16, which numpy lacks, becomes float32.
    """
    return map_nested(_numpy, tensors)


def find_batch_size(tensors: Any) -> int | None:
    """Finds the first dimension of the first tensor or array in a nested value.

    Args:
        tensors: nested value.

    Returns:
        The number of rows; None if no tensor has dimensions.
    """
    if type(tensors) is dict:  # a batch, as a rule; `isinstance` takes long to find that a tensor is no mapping
        for value in tensors.values():
            if type(value) is torch.Tensor and (shape := value.shape):
                return shape[0]
            if type(value) is not torch.Tensor and (size := find_batch_size(value)) is not None:
                return size
        return None
    if isinstance(tensors, (Mapping, list, tuple)):
        parts = tensors.values() if isinstance(tensors, Mapping) else tensors
        return next((size for size in map(find_batch_size, parts) if size is not None), None)
    return int(tensors.shape[0]) if getattr(tensors, "ndim", 0) >= 1 else None


def count_samples(batch: Any) -> int | None:
    """Counts the samples of a batch.

    A list of samples that no collator has joined has one entry for each, and so has a list in a mapping without tensors
    of its own, such as texts or images of different sizes.

    Args:
        batch: a mapping, list, tuple or tensor, or an object.

    Returns:
        The number of samples; None for an object that does not show it.
    """
    if isinstance(batch, list) and batch and isinstance(batch[0], (Mapping, list, tuple, str)):
        return len(batch)
    if isinstance(batch, Mapping) and not isinstance(next(iter(batch.values()), None), torch.Tensor):
        joined = [value for value in batch.values() if not isinstance(value, (list, tuple))]
        size = find_batch_size(joined)
        lengths = {len(value) for value in batch.values() if isinstance(value, (list, tuple))}
        if size is not None or len(lengths) != 1:
            return find_batch_size(batch) if size is None else size
        return lengths.pop()
    return find_batch_size(batch)


def nested_concat(tensors: Any, new_tensors: Any, padding_index: int = IGNORE_INDEX) -> Any:
    """Joins two nested values of one structure along the first dimension.

    Args:
        tensors: nested tensors or arrays.
        new_tensors: of the same structure.
        padding_index: pads the second dimension of shorter ones.

    Returns:
        The joined value.

    Raises:
        AssertionError: the structures differ.
        TypeError: a leaf is neither a tensor nor an array.
    """
    both_tensors = isinstance(tensors, torch.Tensor) and isinstance(new_tensors, torch.Tensor)
    if not both_tensors and type(tensors) is not type(new_tensors):
        raise AssertionError(
            f"A {type(tensors).__name__} and a {type(new_tensors).__name__} cannot be joined; give two values of one "
            "structure."
        )
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(nested_concat(a, b, padding_index) for a, b in zip(tensors, new_tensors, strict=False))
    if isinstance(tensors, Mapping):
        joined = {key: nested_concat(value, new_tensors[key], padding_index) for key, value in tensors.items()}
        return type(tensors)(joined)  # type: ignore[call-arg]
    if isinstance(tensors, torch.Tensor):
        return torch_pad_and_concatenate(tensors, new_tensors, padding_index)
    if isinstance(tensors, np.ndarray):
        return numpy_pad_and_concatenate(tensors, new_tensors, padding_index)
    raise TypeError(f"A {type(tensors).__name__} cannot be joined; only tensors, arrays and nests of them can.")


def torch_pad_and_concatenate(
    tensor1: torch.Tensor, tensor2: torch.Tensor, padding_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Joins two tensors along the first dimension.

    Args:
        tensor1: of any number of dimensions; a scalar counts as one row.
        tensor2: as the first one.
        padding_index: fills the shorter second dimension.

    Returns:
        The joined tensor.
    """
    first, second = (tensor.reshape(-1) if tensor.ndim == 0 else tensor for tensor in (tensor1, tensor2))
    if first.ndim == 1 or first.shape[1] == second.shape[1]:
        return torch.cat((first, second))
    joined = first.new_full(_joined_shape(first, second), padding_index)
    return _filled(joined, first, second)  # type: ignore[no-any-return]


def numpy_pad_and_concatenate(array1: Any, array2: Any, padding_index: int = IGNORE_INDEX) -> Any:
    """Joins two arrays as `torch_pad_and_concatenate` does tensors.

    Args:
        array1: of any number of dimensions.
        array2: as the first one.
        padding_index: fills the shorter second dimension.

    Returns:
        The joined array.
    """
    first = np.atleast_1d(array1)
    second = np.atleast_1d(array2)
    if first.ndim == 1 or first.shape[1] == second.shape[1]:
        return np.concatenate((first, second))
    return _filled(np.full(_joined_shape(first, second), padding_index, dtype=first.dtype), first, second)


def _joined_shape(first: Any, second: Any) -> tuple[int, ...]:
    return (len(first) + len(second), max(first.shape[1], second.shape[1]), *first.shape[2:])


def _filled(joined: Any, first: Any, second: Any) -> Any:
    joined[: len(first), : first.shape[1]] = first
    joined[len(first) :, : second.shape[1]] = second
    return joined


def _numpy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.cpu()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()
