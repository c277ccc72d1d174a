"""Mistakes on the stand-in, each of which it must find; they run in a process of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from .._support import standin
from .._support.standin.device import MEMORY

COUNTS = standin.COUNTS


def _error_of(mistake: Callable[[], object]) -> str:
    try:
        mistake()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _memory() -> str:
    standin.limit_memory(standin.used_bytes() + 1000)
    try:
        return _error_of(lambda: torch.zeros(1000, device="accel"))
    finally:
        standin.limit_memory(None)


def _without_wait() -> str:
    side = torch.Stream("accel")
    with side:
        values = torch.ones(4, device="accel")
    return _error_of(lambda: values + 1)


def _with_wait() -> str:
    side = torch.Stream("accel")
    with side:
        values = torch.ones(4, device="accel")
        event = side.record_event()
    torch.accelerator.current_stream().wait_event(event)
    return _error_of(lambda: values + 1)


def _freed_early(is_kept: bool) -> int:
    MEMORY.freed_early.clear()
    side = torch.Stream("accel")
    with side:
        values = torch.ones(4, device="accel")
        event = side.record_event()
    computing = torch.accelerator.current_stream()
    computing.wait_event(event)
    if is_kept:
        values.record_stream(computing)
    values.add_(1)
    del values
    gc.collect()
    return len(MEMORY.freed_early)


def _read_too_early() -> list[float]:
    host = torch.zeros(2, pin_memory=True)
    host.copy_(torch.ones(2, device="accel"), non_blocking=True)
    before = host.tolist()
    torch.accelerator.synchronize()
    return [before[0], host.tolist()[0]]


def _counted(work: Callable[[], object]) -> dict[str, int]:
    COUNTS.clear()
    work()
    return dict(COUNTS.waits)


def found(folder: Path) -> dict[str, object]:
    values = torch.arange(4.0).to("accel")
    COUNTS.clear()
    (values * 2 + 1).sum()
    launches = dict(COUNTS.launches)
    torch.manual_seed(5)
    of_device = torch.rand(3, device="accel").cpu()
    state = torch.get_rng_state()
    torch.rand(3, device="accel")
    with torch.autocast("accel", dtype=torch.bfloat16):
        product = torch.ones(2, 2, device="accel") @ torch.ones(2, 2, device="accel")
        soft = torch.softmax(product, dim=0)
    return {
        "type": type(values).__name__,
        "mixed": _error_of(lambda: values + torch.ones(4)),
        "mixed in place": _error_of(lambda: torch.ops.aten.add_(values, torch.ones(4))),
        "two devices": _error_of(lambda: values + torch.ones(4).to("accel:1")),
        "memory": _memory(),
        "no wait": _without_wait(),
        "wait": _with_wait(),
        "freed early": [_freed_early(False), _freed_early(True)],
        "read too early": _read_too_early(),
        "item": _counted(lambda: values.sum().item()),
        "branch": _counted(lambda: bool(values.sum() > 0)),
        "to the host": _counted(lambda: values.cpu()),
        "nonzero": _counted(lambda: values.nonzero()),
        "synchronize": _counted(torch.accelerator.synchronize),
        "nothing": _counted(lambda: torch.where(values > 0, values, values * 2)),
        "launches": launches,
        "unwritten": bool(torch.empty(2, device="accel").isnan().all()),
        "own generator": torch.equal(state, torch.get_rng_state()),
        "seeded": torch.equal(of_device, torch.rand(3, generator=torch.Generator().manual_seed(5))),
        "autocast": [str(product.dtype), str(soft.dtype)],
        "storages": values.untyped_storage().data_ptr() == values[1:].untyped_storage().data_ptr(),
    }
