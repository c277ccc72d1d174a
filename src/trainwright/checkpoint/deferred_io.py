"""Sinks for a checkpoint's large files: written immediately, or copied to reusable memory and written later."""

from __future__ import annotations

import copy
import logging
import mmap
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from trainwright._types import Nested
from trainwright.distributed.device import free_bytes, pins_memory, synchronize
from trainwright.support.host import available_bytes
from trainwright.support.tensor_tree import iterate_tensors

logger = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.5  # share of the available memory that a copy may use
SHARE_OF_DEVICE = 0.25  # share of a device's free memory that a copy may use for the time of a write
BOUNCE_BYTES = 16 << 20  # pinned memory between a device and the host's ordinary memory

Write = Callable[[Nested], None]


class CopyRequest(NamedTuple):
    """Memory required for a copy and available on a machine, in bytes; or the reason against a copy."""

    host: str
    lacking_bytes: int
    available_bytes: int
    obstacle: str | None = None


def why_not_copy(requests: Sequence[CopyRequest]) -> str | None:
    """Returns the reason for writing immediately, or None if processes copy; processes on one host share its memory."""
    if obstacle := next((request.obstacle for request in requests if request.obstacle is not None), None):
        return obstacle
    for host in dict.fromkeys(request.host for request in requests):
        here = [request for request in requests if request.host == host]
        lacking = sum(request.lacking_bytes for request in here)
        if lacking > min(request.available_bytes for request in here) * SHARE_OF_MEMORY:
            return f"{lacking:,} bytes of memory are too much for a copy"
    return None


class ImmediateSink:
    """Sink that writes immediately."""

    def put(self, tree: Nested, write: Write, *, shared: bool = False) -> None:
        """Calls `write` with the current values of nested tensors; `shared`: all processes do so now, or all later."""
        write(tree)


class DeferredSink:
    """Sink that copies immediately and writes in `write`. If memory or tensors rule out a copy, it writes immediately.

    `everybodys` gathers one value from each process, by rank; `is_shared`: a pending write is collective.
    """

    def __init__(self, buffers: HostBuffers, everybodys: Callable[[CopyRequest], Sequence[CopyRequest]]) -> None:
        self.is_shared = False
        self._buffers = buffers
        self._everybodys = everybodys
        self._writes: list[tuple[Nested, Write]] = []

    def put(self, tree: Nested, write: Write, *, shared: bool = False) -> None:
        """Copies the tree, or writes it immediately if that is impossible."""
        everybodys = self._everybodys if shared else lambda mine: [mine]
        mine = self._request(tree)
        copied = None
        requests = everybodys(mine)
        if (reason := why_not_copy(requests)) is None:
            try:
                copied = self._buffers.make_copy(tree)
            except (MemoryError, OSError, RuntimeError) as error:  # from python, mmap, or torch's allocators
                logger.warning("A checkpoint could not be copied in memory: %s", error or type(error).__name__)
                mine = mine._replace(lacking_bytes=max(1, mine.lacking_bytes), available_bytes=0)
            requests = everybodys(mine)
            if (reason := why_not_copy(requests)) is None:
                self._writes.append((copied, write))
                self.is_shared = self.is_shared or shared
                return
        level = logging.INFO if any(request.obstacle for request in requests) else logging.WARNING
        logger.log(level, "Training pauses while a file of a checkpoint is written: %s.", reason)
        write(tree)

    def _request(self, tree: Nested) -> CopyRequest:
        host = socket.gethostname()
        try:
            return CopyRequest(host, self._buffers.missing_bytes(tree), available_bytes())
        except NotPlainError as error:
            return CopyRequest(host, 0, 0, f"{error} cannot be copied")

    def write(self) -> None:
        """Writes all copies."""
        self._buffers.land()
        for tree, write in self._writes:
            write(tree)
        self._writes.clear()


IMMEDIATE = ImmediateSink()
FileSink: TypeAlias = ImmediateSink | DeferredSink  # destination of large files


# -- copies of tensors that training keeps changing ----------------------------------------------------------------


ALIGNMENT = 64
Kind: TypeAlias = tuple[int, bool]  # (size of a storage in bytes, whether its copy is pinned)


class NotPlainError(Exception):
    """A tensor that is more than values in memory (quantised, sharded, sparse) and cannot be copied bytewise."""


class HostBuffers:
    """Memory for copies, reused from one snapshot to the next.

    A copy preserves sharing: tensors that are views of one storage become views of one copy of it.

    If a device has room for a second copy of its values, they are copied there, which takes milliseconds, and `land`
    brings them to the host. Otherwise training waits for pinned memory, whose allocation takes about a second for 2 GB.
    """

    def __init__(self) -> None:
        self._bounce: torch.Tensor | None = None
        self._on_their_way: list[tuple[torch.Tensor, torch.Tensor, torch.Event]] = []  # target, copy, when it is made
        self._free: dict[Kind, list[torch.UntypedStorage]] = defaultdict(list)
        self._taken: list[tuple[Kind, torch.UntypedStorage]] = []
        self._copies: dict[torch.UntypedStorage, torch.UntypedStorage] = {}  # by original, which torch keeps unique

    def missing_bytes(self, tree: Nested) -> int:
        """Returns the bytes that a copy needs beyond the reusable memory; NotPlainError as for `make_copy`."""
        wanted = Counter(self._kinds(self._new_storages([check_plain(tensor) for tensor in iterate_tensors(tree)])))
        return sum(kind[0] * max(count - len(self._free[kind]), 0) for kind, count in wanted.items())

    def make_copy(self, tree: Nested) -> Nested:
        """Returns a copy with tensors in this memory, on the CPU, and the rest deep-copied; or raises NotPlainError.

        Values of a device are there after `land`, which another thread may call.
        """
        originals = [check_plain(tensor) for tensor in iterate_tensors(tree)]
        new = self._new_storages(originals)
        kinds = self._kinds(new)
        self._reserve(kinds)
        has_room = {device: _fits(new, device) for device in {storage.device for storage in new}}
        for storage, kind in zip(new, kinds, strict=True):
            self._copies[storage] = self._fill(storage, kind, may_wait=has_room[storage.device])
        for device in {storage.device for storage, kind in zip(new, kinds, strict=True) if kind[1]}:
            synchronize(device)  # copies are in progress, and the next step changes their originals
        return copy.deepcopy(tree, {id(tensor): self._twin(tensor) for tensor in originals})

    def land(self) -> None:
        """Brings the values that were copied on their device to the host."""
        waiting = self._on_their_way
        self._on_their_way = []
        streams = {device: torch.Stream(device) for device in {copied.device for _, copied, _ in waiting}}
        for target, copied, made in waiting:
            assert self._bounce is not None
            stream = streams[copied.device]
            with stream:
                stream.wait_event(made)
                _bring(copied, target, self._bounce, stream)

    def _kinds(self, storages: list[torch.UntypedStorage]) -> list[Kind]:
        """Returns the kind of memory for the copy of each storage."""
        is_pinned = {
            device: pins_memory(device) and self._must_be_pinned(storages, device)
            for device in {storage.device for storage in storages}
        }
        return [(storage.nbytes(), is_pinned[storage.device]) for storage in storages]

    def _must_be_pinned(self, storages: list[torch.UntypedStorage], device: torch.device) -> bool:
        """Returns whether values of a device go to pinned memory; memory of an earlier copy is reused."""
        wanted = Counter(storage.nbytes() for storage in storages if storage.device == device)
        for is_pinned in (False, True):
            if all(count <= len(self._free[size, is_pinned]) for size, count in wanted.items()):
                return is_pinned
        return not _fits(storages, device)

    def _new_storages(self, tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Returns the distinct storages of tensors that this snapshot has not copied yet."""
        storages = dict.fromkeys(tensor.untyped_storage() for tensor in tensors)
        return [storage for storage in storages if storage not in self._copies]

    def _reserve(self, kinds: list[Kind]) -> None:
        """Allocates the missing memory, in one piece unless it must be pinned."""
        wanted = Counter(kind for kind in kinds if not kind[1] and kind[0] > 0)
        lacking = [kind for kind, count in wanted.items() for _ in range(count - len(self._free[kind]))]
        total = sum(_aligned(size) for size, _ in lacking)
        if total == 0:
            return
        arena = mmap.mmap(-1, total)
        start = 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            arena.madvise(mmap.MADV_HUGEPAGE)  # far fewer page faults
        for kind in lacking:
            piece = torch.frombuffer(arena, dtype=torch.uint8, count=kind[0], offset=start)
            self._free[kind].append(piece.untyped_storage())
            start += _aligned(kind[0])

    def _fill(self, storage: torch.UntypedStorage, kind: Kind, *, may_wait: bool) -> torch.UntypedStorage:
        """Returns memory of this kind with the values of a storage; they may wait on their device for `land`."""
        if self._free[kind]:
            target = self._free[kind].pop()
        else:
            target = torch.empty(kind[0], dtype=torch.uint8, pin_memory=kind[1]).untyped_storage()
        self._taken.append((kind, target))
        waits = may_wait and pins_memory(storage.device) and not kind[1] and self._wait(storage, target)
        if not waits:
            _view_bytes(target).copy_(_view_bytes(storage), non_blocking=kind[1])
        return target

    def _wait(self, storage: torch.UntypedStorage, target: torch.UntypedStorage) -> bool:
        """Copies a storage on its device; returns False if it has no memory for that."""
        if self._bounce is None:
            self._bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        try:
            copied = _view_bytes(storage).clone()
        except torch.OutOfMemoryError:
            return False
        made = torch.Event(storage.device)
        made.record()
        self._on_their_way.append((_view_bytes(target), copied, made))
        return True

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's view of the copy of its storage."""
        storage = self._copies[tensor.untyped_storage()]
        twin = torch.empty(0, dtype=tensor.dtype)
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def end_snapshot(self) -> None:
        """Ends the sharing of storages: later copies share nothing with earlier ones."""
        self._copies.clear()

    def give_back(self) -> None:
        """Makes the copies available for reuse."""
        self._on_their_way.clear()
        for key, storage in self._taken:
            self._free[key].append(storage)
        self._taken.clear()
        self.end_snapshot()

    def drop(self) -> None:
        """Frees the memory."""
        self.give_back()
        self._free.clear()
        self._bounce = None


def check_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if its values are exactly its storage; raises NotPlainError otherwise."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        raise NotPlainError(f"a tensor of type {type(tensor).__name__}")
    return tensor


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _fits(storages: list[torch.UntypedStorage], device: torch.device) -> bool:
    """Returns whether a device has room for a copy of its storages, with a reserve for training."""
    wanted = sum(storage.nbytes() for storage in storages if storage.device == device)
    return wanted <= free_bytes(device) * SHARE_OF_DEVICE


def _bring(source: torch.Tensor, target: torch.Tensor, bounce: torch.Tensor, stream: torch.Stream) -> None:
    """Copies bytes to the host through pinned memory, since direct copies to ordinary memory delay training."""
    source.record_stream(stream)
    for start in range(0, len(source), BOUNCE_BYTES):
        piece = source[start : start + BOUNCE_BYTES]
        passing = bounce[: len(piece)]
        passing.copy_(piece, non_blocking=True)
        stream.synchronize()
        target[start : start + BOUNCE_BYTES].copy_(passing)


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
