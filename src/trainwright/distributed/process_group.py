"""Process group: started where arguments or an engine need it, destroyed when a script ends in order.

Where one exists already, it is used.
"""

from __future__ import annotations

import atexit
import functools
import os
from datetime import timedelta

from trainwright.distributed.world import World, launcher_keeps_the_store


def start_group(world: World, *, backend: str | None, timeout: timedelta) -> None:
    """Starts the process group of several processes, if there is none; by default with the backend of the device."""
    import torch.distributed as dist

    from trainwright.distributed import device

    if world.world_size == 1 or dist.is_initialized():
        return
    os.environ.update({name: value for name, value in world.variables().items() if name not in os.environ})
    device.make_current(world.device)
    backend = backend or device.group_backend(world.device.type)
    dist.init_process_group(backend, init_method=init_method(), timeout=timeout)
    leave_at_exit()


def start_alone(device_type: str, *, backend: str | None, timeout: timedelta) -> None:
    """Starts a process group of this process alone, if there is none: for backends that need a group."""
    import torch.distributed as dist

    from trainwright.distributed.device import group_backend

    if dist.is_initialized():
        return
    backend = backend or group_backend(device_type)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    leave_at_exit()


def init_method() -> str | None:
    """URL for torch's `init_process_group` where torchrun may restart the processes; else None, torch's default."""
    if not launcher_keeps_the_store():
        return None
    from trainwright.distributed import elastic_store

    return elastic_store.register()


@functools.cache
def leave_at_exit() -> None:
    """Destroys the process group when the script ends in order."""
    atexit.register(_leave)


def stay_in_the_group() -> None:
    """Leaves the process group as it is at exit: after a failure, destroying it would wait for ranks that are gone."""
    atexit.unregister(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
