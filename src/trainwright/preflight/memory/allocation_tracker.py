"""Tracker: counts the bytes of the tensors that are alive while a step runs, real ones or stand-ins without memory.

A tensor's memory counts from the operation that made it until nothing refers to it. What a kernel takes for itself
while it runs is not seen; for the operations of usual models that is little.
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainwright.distributed.device import kind_of
from trainwright.preflight.memory.memory_plan import PeakMemory
from trainwright.support.tensor_tree import tensors_of


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts on one kind of device while it is entered; `peaks` has the fullest moment of each kind."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = "forward"
        self.is_backward = False  # in a backward pass, forward passes that it repeats included
        self._device = device.type
        self._block = kind_of(device).block_bytes
        self._live: dict[int, tuple[int, str, str, object]] = {}  # bytes, kind, module, weak reference
        self._kinds: Counter[str] = Counter()
        self._modules: Counter[str] = Counter()
        self._path: list[str] = []
        self._total = 0
        self.peaks: dict[str, PeakMemory] = {}

    def count(self, tensors: Iterable[object], kind: str) -> None:
        """Counts existing tensors as of a kind, or changes the kind of counted ones."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
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
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # questions about a tensor
            return result
        is_forward = self.moment == "forward" and (not self.is_backward or bool(self._path))
        kind = "activations" if is_forward else "other"
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._add(tensor, storage, kind, self._path[-1] if self._path else "")
        self._look("backward" if self.is_backward else self.moment)
        return result

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
            handles.append(module.register_forward_pre_hook(partial(self._enter, block_of(name))))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                handles.append(register(lambda with_gradient: self.count([with_gradient.grad], "gradients")))
        try:
            with _BackwardCalls(self):
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


def block_of(name: str) -> str:
    """Returns the part of a model that contains a module: up to its first number, or two names deep."""
    numbered = re.match(r"(.*?\.\d+)(\.|$)", name)
    return numbered[1] if numbered else ".".join(name.split(".")[:2])
