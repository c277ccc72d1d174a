"""Makes the stand-in a device of this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.backend_registration as registration

from . import autocast, collectives, device, generators, kernels, streams
from .counts import COUNTS
from .device import MEMORY, NAME, NUM_DEVICES

# Operations that torch would take apart for a device without kernels of its own, where a GPU has one kernel.
OWN_KERNELS = ("native_layer_norm", "native_group_norm", "_log_softmax", "_softmax", "embedding_dense_backward")
FOREACH = sorted(
    {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_foreach_")
    }
)
_kept: list[torch.library.Library] = []


class Module:
    """`torch.accel`, as a backend's package would bring it."""

    Stream = streams.Stream
    Event = streams.Event
    get_rng_state = staticmethod(generators.get_rng_state)
    set_rng_state = staticmethod(generators.set_rng_state)
    get_rng_state_all = staticmethod(generators.get_rng_state_all)
    set_rng_state_all = staticmethod(generators.set_rng_state_all)
    manual_seed = staticmethod(generators.manual_seed)
    manual_seed_all = staticmethod(generators.manual_seed_all)
    initial_seed = staticmethod(generators.initial_seed)
    synchronize = staticmethod(streams.synchronize)
    current_stream = staticmethod(streams.current_stream)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return NUM_DEVICES if "STANDIN_DEVICES" not in os.environ else int(os.environ["STANDIN_DEVICES"])

    def current_device(self) -> int:
        return device.current.index

    def set_device(self, which: Any) -> None:
        device.current.index = which if isinstance(which, int) else device.index_of(which)

    @contextmanager
    def device(self, which: Any) -> Iterator[None]:
        before = device.current.index
        self.set_device(which)
        try:
            yield
        finally:
            device.current.index = before

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def get_device_name(self, which: Any = None) -> str:
        return "Stand-in"

    def empty_cache(self) -> None:
        COUNTS.launches["empty_cache"] += 0

    def memory_allocated(self, which: Any = None) -> int:
        return MEMORY.used

    def max_memory_allocated(self, which: Any = None) -> int:
        return MEMORY.peak

    def reset_peak_memory_stats(self, which: Any = None) -> None:
        MEMORY.peak = MEMORY.used

    def mem_get_info(self, which: Any = None) -> tuple[int, int]:
        total = MEMORY.limit or 2**34
        return total - MEMORY.used, total


def install() -> None:
    """Registers the device, once in a process."""
    registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(kernels.run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in (*OWN_KERNELS, *FOREACH):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            aten.impl(op, functools.partial(kernels.run, op), "PrivateUse1")
    autocast.register(aten)
    collectives.register()
    _kept.extend((everything, aten))
    # A module that moves keeps its parameters, as on a GPU: torch makes others for a device that it does not know, and
    # tied weights would come apart. Without it, engines must keep them together (see `torn_ties` in tests/accelerator).
    if os.environ.get("STANDIN_SWAPS", "1") == "1":
        torch.__future__.set_swap_module_params_on_conversion(True)
    _patch_torch()


def _patch_torch() -> None:
    """Replaces the functions that ask a backend's C++ part, which the stand-in has not."""
    torch.Stream = streams.Stream  # type: ignore[assignment, misc]
    torch.Event = streams.Event  # type: ignore[assignment, misc]
    torch.accelerator.current_stream = streams.current_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = streams.synchronize  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda which: Module().set_device(which)  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: device.current.index  # type: ignore[assignment]
    torch.accelerator.empty_cache = lambda: None  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: kernels.record_stream(None, self, stream)  # type: ignore[assignment, method-assign]
    torch.Tensor.pin_memory = _pinned  # type: ignore[assignment, method-assign]
    torch.Tensor.is_pinned = lambda self, device=None: _is_pinned(self)  # type: ignore[assignment, method-assign]
    for name in ("empty", "zeros", "ones", "full"):
        setattr(torch, name, _pinning(getattr(torch, name)))


_PINNED: set[int] = set()  # addresses of storages; they are kept, so that no other storage takes their place
_KEPT: list[torch.Tensor] = []


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    COUNTS.pins += 1
    return _keep(tensor.clone())


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    _PINNED.add(tensor.untyped_storage().data_ptr())
    _KEPT.append(tensor)
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _PINNED


def _pinning(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if pin_memory:
            COUNTS.pins += 1
            _keep(tensor)
        return tensor  # type: ignore[no-any-return]

    return made
