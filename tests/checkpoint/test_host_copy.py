"""Copies that a later step does not reach, with the sharing of their originals, in memory that is used again."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from trainwright.checkpoint.deferred_io import HostBuffers, NotPlainError
from trainwright.support.host import available_bytes


def trees() -> dict[str, Any]:
    base = torch.arange(12.0)
    shared = (0.9, 0.999)
    ordered = OrderedDict(a=base[:6].view(2, 3), b=base[6:])
    ordered.metadata = {"version": 1}  # type: ignore[attr-defined]
    return {
        "views": {"whole": base, "part": base[3:7], "strided": base[::2], "turned": base.view(3, 4).t()},
        "ordered": ordered,
        "nested": {"state": {0: {"step": torch.tensor(3.0), "m": torch.ones(3)}}, "groups": [{"betas": shared}] * 2},
        "types": [torch.ones(3, dtype=t) for t in (torch.bfloat16, torch.int64, torch.bool, torch.complex64)],
        "empty": [torch.empty(0), torch.empty(0, 3)],
        "parameter": (torch.nn.Parameter(torch.ones(2)), None, "word", 1.5),
    }


def as_bytes(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


@pytest.mark.parametrize("name", trees())
def test_a_copy_is_written_with_the_same_bytes(name: str) -> None:
    """Views stay views of one storage, objects that occur twice occur twice."""
    tree = trees()[name]
    assert as_bytes(HostBuffers().make_copy(tree)) == as_bytes(tree)


def test_what_happens_to_the_original_later_is_not_seen() -> None:
    tree = {"w": torch.ones(1000), "lr": [1.0]}
    copied = HostBuffers().make_copy(tree)
    tree["w"].add_(1)  # type: ignore[attr-defined]
    tree["lr"][0] = 2.0  # type: ignore[index]
    assert (copied["w"].sum().item(), copied["lr"]) == (1000, [1.0])


def test_memory_is_used_again() -> None:
    buffers = HostBuffers()
    tree = [torch.rand(1000), torch.rand(1000), torch.rand(50)]
    assert buffers.missing_bytes(tree) == 4 * 2050
    first = {tensor.data_ptr() for tensor in buffers.make_copy(tree)}
    assert buffers.missing_bytes([torch.rand(50)]) == 200  # taken until they are given back
    buffers.give_back()
    assert buffers.missing_bytes(tree) == 0
    assert {tensor.data_ptr() for tensor in buffers.make_copy([torch.rand(1000), torch.rand(50)])} < first
    buffers.drop()
    assert buffers.missing_bytes(tree) == 4 * 2050


def test_what_two_trees_share_is_copied_once() -> None:
    buffers = HostBuffers()
    weight = torch.rand(100)
    one = buffers.make_copy([weight])
    other = buffers.make_copy([weight])
    assert one[0].data_ptr() == other[0].data_ptr()


def test_memory_that_changed_hands_is_not_taken_for_shared() -> None:
    buffers = HostBuffers()
    copies = [buffers.make_copy([torch.full((1000,), float(i))])[0] for i in range(20)]  # each original is gone at once
    assert [copied.mean().item() for copied in copies] == list(range(20))


class Quantised(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.empty(2, device="meta"), torch.ones(2).as_subclass(Quantised)]
)
def test_what_is_more_than_values_in_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(NotPlainError):
        HostBuffers().make_copy({"a": torch.ones(2), "b": tensor})


def test_available_memory_is_a_number_of_bytes() -> None:
    assert available_bytes() > 1 << 20
