"""Memory of the stand-in: blocks with an address, counted and limited; tensors there and their twins on the host.

A tensor travels between the devices by DLPack, whose capsule says on which device the memory lies: it is the same
memory, and the capsule is changed.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import streams

NAME = "accel"
NUM_DEVICES = 2
HOST = 1  # DLPack's kDLCPU
DEVICE = 12  # DLPack's kDLExtDev

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Memory:
    def __init__(self) -> None:
        self.limit: int | None = None
        self.is_broken = False  # each operation fails, as on a GPU after an error of a kernel
        self.used = 0
        self.peak = 0
        self.freed_early: list[str] = []  # blocks that were given back while another stream read them


MEMORY = _Memory()
BLOCKS: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


def limit_memory(num_bytes: int | None) -> None:
    """Lets allocations raise `torch.OutOfMemoryError` above so many bytes; None: no limit."""
    MEMORY.limit = num_bytes


def used_bytes() -> int:
    return MEMORY.used


def peak_bytes() -> int:
    return MEMORY.peak


class Block(bytearray):
    """Memory of one storage."""

    use: streams.Use

    def __del__(self) -> None:
        MEMORY.used -= len(self)
        if self.use.is_freed_early():
            MEMORY.freed_early.append(f"{len(self)} bytes")


def _block(num_bytes: int) -> Block:
    if MEMORY.limit is not None and MEMORY.used + num_bytes > MEMORY.limit:
        raise torch.OutOfMemoryError(
            f"{NAME} out of memory. Tried to allocate {num_bytes} bytes; {MEMORY.used} of {MEMORY.limit} are in use."
        )
    block = Block(num_bytes)
    block[:] = b"\xff" * num_bytes  # NaN, or -1
    block.use = streams.Use()
    MEMORY.used += num_bytes
    MEMORY.peak = max(MEMORY.peak, MEMORY.used)
    return block


def moved(tensor: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    """The same memory as a tensor of another device."""
    capsule: Any = to_dlpack(tensor)
    address = _pointer(capsule, b"dltensor")
    (ctypes.c_int32 * 2).from_address(address + ctypes.sizeof(ctypes.c_void_p))[:] = [kind, index]
    return from_dlpack(capsule)


def index_of(device: Any) -> int:
    """The number of a device; that of the current one where there is none."""
    found = torch.device(NAME if device is None else device).index
    return current.index if found is None else found


class _Current:
    index = 0


current = _Current()


def allocate(size: list[int], stride: list[int] | None, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    """Memory of the device, not written yet."""
    dtype = dtype or torch.get_default_dtype()
    shape = torch.empty(size, device="meta") if stride is None else torch.empty_strided(size, stride, device="meta")
    steps = shape.stride()
    last = 0 if shape.numel() == 0 else sum((n - 1) * step for n, step in zip(size, steps, strict=True)) + 1
    if last == 0:
        flat = torch.empty(0, dtype=dtype)
    else:
        block = _block(last * dtype.itemsize)
        flat = torch.frombuffer(block, dtype=dtype)
        BLOCKS[flat.data_ptr()] = block
    made = moved(flat, DEVICE, index_of(device))
    torch.ops.aten.as_strided_(made, size, steps, 0)
    return made


def on_device(host: torch.Tensor, device: Any) -> torch.Tensor:
    """A copy of a tensor in memory of the device."""
    made = allocate(list(host.shape), list(host.stride()) if _is_dense(host) else None, host.dtype, device)
    twin_of(made).copy_(host)
    return made


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def twin_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a tensor of the CPU, for kernels."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise NotImplementedError("conjugate and negative views on the stand-in")
    return moved(tensor, HOST, 0)


def use_of(tensor: torch.Tensor) -> streams.Use | None:
    """Who reads and writes the tensor's memory; None where it has none."""
    block = BLOCKS.get(tensor.untyped_storage().data_ptr())
    return None if block is None else block.use


def is_here(value: object) -> bool:
    """True for a tensor on the stand-in."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME
