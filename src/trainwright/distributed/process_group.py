"""The process group: started early where arguments make processes wait for each other, and left when a script ends.

A trainer's engine starts it through accelerate, or takes the one that is there.
"""

from __future__ import annotations

import atexit
import functools
import os
from datetime import timedelta

from trainwright.distributed.elastic_store import init_method
from trainwright.distributed.world import World


def start_group(world: World, *, backend: str | None, timeout: timedelta) -> None:
    """Starts the group if this process is one of several and nobody has done so yet."""
    import torch
    import torch.distributed as dist

    if world.world_size == 1 or dist.is_initialized():
        return
    os.environ.update({name: value for name, value in world.variables().items() if name not in os.environ})
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    default = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}.get(world.device.type, "gloo")
    dist.init_process_group(default if backend is None else backend, init_method=init_method(), timeout=timeout)
    leave_at_exit()


def start_alone(kind: str, *, backend: str | None, timeout: timedelta) -> None:
    """Starts a group of this one process, if there is none: for backends that cannot do without."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        return
    default = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}.get(kind, "gloo")
    dist.init_process_group(default if backend is None else backend, store=HashStore(), rank=0, world_size=1,
                            timeout=timeout)  # fmt: skip
    leave_at_exit()


@functools.cache
def leave_at_exit() -> None:
    """A script that ends in order leaves the group; one that dies must not wait there for the others."""
    atexit.register(_leave)


def stay_in_the_group() -> None:
    """After a failure nobody leaves in order: that would wait for those who are gone."""
    atexit.unregister(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
