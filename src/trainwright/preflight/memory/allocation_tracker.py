"""Tracker: counts the bytes of the tensors that are alive while a step runs, real ones or stand-ins without memory.

A tensor's memory counts from the operation that made it until nothing refers to it, with the size that it has: that of
a layer that is gathered for a pass is taken and given back. What a kernel takes for itself while it runs is not seen;
for the operations of usual models that is little.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainwright.distributed.device import get_kind
from trainwright.preflight.memory.memory_plan import Collective, PeakMemory
from trainwright.support.tensor_tree import iterate_tensors, local_part

# Operations of torch by which layers in parts are gathered, and their gradients sent: operation -> purpose of the
# tensors that it makes or fills.
OF_EXCHANGE = {
    "all_gather_copy_in": "communication",
    "chunk_cat": "communication",
    "split_with_sizes_copy": "gathered",
}
# Part of the name of an operation -> name of the collective; the first that is found counts.
COLLECTIVES = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "barrier": "barrier",
}
OF_GROUPS = ("c10d", "_c10d_functional")  # namespaces of operations between processes


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collective operations that are called while it is entered, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # as torch has it
        if func.namespace in OF_GROUPS:
            self.note(func, args)
        return func(*args, **(kwargs or {}))

    def note(self, func: Any, args: Any) -> str:
        """Counts a call, by the largest of its arguments; returns the name of the collective, "" for a wait."""
        name = next((title for part, title in COLLECTIVES.items() if part in func.name()), "")
        if name:
            self._calls[name] += 1
            self._bytes[name] += max((_num_bytes(iterate_tensors(part)) for part in args), default=0)
        return name

    def found(self) -> tuple[Collective, ...]:
        """Returns the counts, the most bytes first."""
        rows = [Collective(name=name, calls=calls, bytes=self._bytes[name]) for name, calls in self._calls.items()]
        return tuple(sorted(rows, key=lambda row: -row.bytes))


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts on one kind of device while it is entered; `peaks` has the fullest moment of each kind."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = "forward"
        self.is_backward = False  # in a backward pass, forward passes that it repeats included
        self._device = device.type
        self._block = get_kind(device).block_bytes
        self._live: dict[int, tuple[int, str, str, object]] = {}  # bytes, kind, module, weak reference
        self._kinds: Counter[str] = Counter()
        self._modules: Counter[str] = Counter()
        self._path: list[str] = []
        self._total = 0
        self.peaks: dict[str, PeakMemory] = {}
        self.collectives = CollectiveCounter()

    def count(self, tensors: Iterable[object], kind: str) -> None:
        """Counts existing tensors as of a kind, or changes the kind of counted ones."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            tensor = local_part(tensor)
            storage = tensor.untyped_storage()
            known = self._live.get(id(storage))
            if known is None:
                self._add(tensor, storage, kind, "")
            elif known[1] != kind:
                size, before, module, reference = known
                self._live[id(storage)] = size, kind, "", reference
                self._kinds[before] -= size
                self._kinds[kind] += size
                self._modules[module] -= size if before == "activations" else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # as torch has it
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again with the part of this process
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # questions about a tensor
            return result
        is_forward = self.moment == "forward" and (not self.is_backward or bool(self._path))
        kind = "activations" if is_forward else "other"
        for tensor in iterate_tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._add(tensor, storage, kind, self._path[-1] if self._path else "")
        if func.namespace in OF_GROUPS:
            self._note(self.collectives.note(func, args), args)
        elif (purpose := OF_EXCHANGE.get(func.name().rpartition("::")[2].partition(".")[0])) is not None:
            self.count(iterate_tensors((kwargs or {}).get("out", result)), purpose)
        self._look("backward" if self.is_backward else self.moment)
        return result

    def _note(self, collective: str, args: Any) -> None:
        """Counts the tensors of a collective operation as buffers; the sum that a process receives is a gradient."""
        if collective == "reduce_scatter":
            self.count(iterate_tensors(args[0]), "gradients")
            self.count(iterate_tensors(args[1]), "communication")
        elif collective in ("all_gather", "all_to_all"):
            self.count(iterate_tensors(list(args[:2])), "communication")

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Counts memory that is taken or given back for a tensor that stays, while entered."""
        storages: Any = torch.UntypedStorage  # its method is replaced while this is entered
        resize = storages.resize_

        @functools.wraps(resize)
        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        storages.resize_ = counted
        try:
            yield
        finally:
            storages.resize_ = resize

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(id(storage))
        if known is None:
            return
        size, kind, module, reference = known
        now = -(-storage.nbytes() // self._block) * self._block
        self._live[id(storage)] = now, kind, module, reference
        self._total += now - size
        self._kinds[kind] += now - size
        if kind == "activations":
            self._modules[module] += now - size
        self._look("backward" if self.is_backward else self.moment)

    def _add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, kind: str, module: str) -> None:
        if tensor.device.type != self._device:
            return
        key = id(storage)  # torch keeps one object for a storage, which is gone when its memory is
        size = -(-storage.nbytes() // self._block) * self._block
        self._live[key] = size, kind, module, weakref.ref(storage, lambda _: self._remove(key))
        self._total += size
        self._kinds[kind] += size
        if kind == "activations":
            self._modules[module] += size

    def _remove(self, key: int) -> None:
        size, kind, module, _ = self._live.pop(key)
        self._total -= size
        self._kinds[kind] -= size
        if kind == "activations":
            self._modules[module] -= size

    def _look(self, moment: str) -> None:
        before = self.peaks.get(moment)
        if before is None or self._total > before.total_bytes:
            # a unary plus drops the counts of 0 and below
            modules = +self._modules
            kinds = +self._kinds
            self.peaks[moment] = PeakMemory(
                total_bytes=self._total, by_kind=dict(kinds), by_module=dict(modules), moment=moment
            )

    def marking(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that makes a backward pass, wrapped so that the tracker knows of the pass."""

        @functools.wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            before = self.is_backward
            self.is_backward = True
            try:
                return backward(*args, **kwargs)
            finally:
                self.is_backward = before

        return marked

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Counts tensors of a module's forward as its own, and gradients as gradients, while entered."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, find_block(name))))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                handles.append(register(lambda with_gradient: self.count([with_gradient.grad], "gradients")))
        try:
            with _BackwardCalls(self), self.resizing():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, *_: object) -> None:
        self._path.append(name)

    def _leave(self, *_: object) -> None:
        self._path.pop()


class _BackwardCalls(TorchFunctionMode):
    """Tells a tracker of each call of `loss.backward()` while it is entered."""

    def __init__(self, tracker: AllocationTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # as torch has it
        called = self._tracker.marking(func) if func is torch.Tensor.backward else func
        return called(*args, **(kwargs or {}))


def find_block(name: str) -> str:
    """Returns the part of a model that contains a module: up to its first number, or two names deep."""
    numbered = re.match(r"(.*?\.\d+)(\.|$)", name)
    return numbered[1] if numbered else ".".join(name.split(".")[:2])
