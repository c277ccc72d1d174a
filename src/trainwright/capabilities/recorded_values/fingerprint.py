"""Fingerprint of a tensor: a hash of its bits, and a few numbers that tell how far two tensors are apart.

Two tensors with the same hash have the same bits. Others are compared by sketches, products with fixed signs:

    sketch_k = sum_i s_ki x_i        s_ki = +1 or -1, from a generator with a fixed seed

The mean square of the differences of sketches estimates the squared distance of the tensors (Achlioptas 2003,
doi:10.1016/S0022-0000(03)00025-4), so neither tensor is kept, and two precisions can be compared.

Weights also have three sums over their bits b_i as integers, modulo 2^64: of b_i, i b_i and i^2 b_i. If one value
differs by d, the sums differ by d, i d and i^2 d. The first two give its place i, and the third confirms it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from trainwright._types import JSONObject
from trainwright.support.tensor_tree import local_part

NUM_SKETCHES = 8  # one for each bit of a byte
SIGNS = 0x5EED  # seed of the signs
WORDS = {1: np.uint8, 2: np.uint16}  # bits of a value as integers, by its bytes; wider values as words of 4 bytes
MODULUS = 1 << 64


def fingerprint(tensor: torch.Tensor, *, with_place: bool = False) -> JSONObject:
    """Returns the fingerprint of a tensor, of any type and on any device; of a sharded one, of this process's part.

    Args:
        tensor: it is copied to the host.
        with_place: add the sums that tell which value differs, if it is only one.

    Returns:
        `dtype`, `shape`, `hash` (xxh3 of the bits), and in float64 `norm`, `max` (of absolute values), `mean` and
        `sketch`; with `with_place`, also `sums`.
    """
    part = local_part(tensor)
    about: JSONObject = {"dtype": str(part.dtype).removeprefix("torch."), "shape": list(part.shape)}
    if part.device.type == "meta":
        return {**about, "hash": ""}
    if part.layout is not torch.strided:
        part = part.to_dense()
    host = part.cpu().contiguous()
    if host.is_complex():
        host = torch.view_as_real(host.resolve_conj()).contiguous()
    bits = host.reshape(-1).view(torch.uint8).numpy()
    values = host.reshape(-1).double().numpy()
    about["hash"] = xxhash.xxh3_64(bits.data).hexdigest()
    about["norm"] = float(np.sqrt(values @ values))
    about["max"] = float(np.abs(values).max()) if values.size else 0.0
    about["mean"] = float(values.mean()) if values.size else 0.0
    about["sketch"] = _sketches(values)
    if with_place:
        about["sums"] = _sums(bits, host.element_size())
    return about


def _sketches(values: Any) -> list[float]:
    raw = np.random.PCG64(SIGNS).random_raw(-(-values.size // 8))  # its numbers are the same in all versions
    signs = np.asarray(raw, dtype="<u8").view(np.uint8)[: values.size]
    total = values.sum()
    # The sum with signs: all values, less twice the values with a minus.
    return [float(total - 2 * values[(signs >> k) & 1 == 1].sum()) for k in range(NUM_SKETCHES)]


def _sums(bits: Any, size: int) -> list[int]:
    words = bits.view(WORDS.get(size, np.uint32)).astype(np.uint64)
    places = np.arange(words.size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        weighted = words * places
        return [int(one.sum(dtype=np.uint64)) for one in (words, weighted, weighted * places)]


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Returns the estimated norm of the difference of two tensors, relative to the larger norm of both.

    Infinity for other shapes, and not a number if a value is not finite.
    """
    if one["shape"] != other["shape"] or "sketch" not in one or "sketch" not in other:
        return float("inf")
    gaps = np.array(one["sketch"], dtype=np.float64) - np.array(other["sketch"], dtype=np.float64)
    norm = max(float(one["norm"]), float(other["norm"]))
    gap = float(np.sqrt(np.mean(gaps**2)))
    return gap / norm if norm else gap


def only_place(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the index of the only value that differs; None if several do, or if it is not known."""
    if one["dtype"] != other["dtype"] or one["shape"] != other["shape"] or "sums" not in one or "sums" not in other:
        return None
    plain, weighted, squared = ((a - b) % MODULUS for a, b in zip(one["sums"], other["sums"], strict=True))
    gap = _signed(plain)
    product = _signed(weighted)
    size = torch.empty((), dtype=getattr(torch, one["dtype"])).element_size()
    words = max(1, size // 4) * int(np.prod(one["shape"], dtype=np.int64))
    if gap == 0 or product % gap or not 0 <= product // gap < words:
        return None
    word = product // gap
    if word * word * gap % MODULUS != squared:
        return None
    return tuple(int(i) for i in np.unravel_index(word // max(1, size // 4), one["shape"])) if one["shape"] else ()


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of nested lists, tuples and mappings, with their places as names: `0`, `logits`, `1.keys`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(part, f"{name}.{key}" if name else str(key))
