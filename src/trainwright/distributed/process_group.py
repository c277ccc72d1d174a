"""Process group: started where arguments or an engine need it, destroyed when a script ends in order.

Where one exists already, it is used.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from trainwright.distributed.world import World, launcher_keeps_the_store
from trainwright.errors import ArgumentError


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


@contextmanager
def simulated_process_group(*, rank: int, num_processes: int, per_node: int) -> Iterator[None]:
    """This process is one of many within the context, in a group that sends nothing: the others are not there.

    A collective operation returns at once, as if all processes had brought the same values; a sum stays the value
    of this process. For plans of a run that is not started.

    Raises:
        ArgumentError: there is a process group already, or torch has no such group.
    """
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        raise ArgumentError(
            "A run of other processes is planned in a process that is alone. Start this one without a launcher, and "
            "end the process group that there is (torch.distributed.destroy_process_group())."
        )
    place = {
        "RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,  # read, and never opened
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        dist.init_process_group("fake", rank=rank, world_size=num_processes)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


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
