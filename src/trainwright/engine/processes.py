"""The Accelerator of one process among several. The group itself is started and left in `config/rendezvous.py`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from trainwright.config.plans import EnginePlan
from trainwright.engine.loaders import loader_configuration


def accelerator_of_several(plan: EnginePlan) -> Any:
    """An Accelerator for this process among the others; starts the process group, or takes the one that is there."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    # Accelerate keeps one state per process; a second trainer may have another precision. The group itself stays.
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update({name: value for name, value in plan.ddp.environment.items() if name not in os.environ})
    ddp = plan.ddp
    options: dict[str, Any] = {}
    for name in ("bucket_cap_mb", "broadcast_buffers", "static_graph"):
        if getattr(ddp, name) is not None:
            options[name] = getattr(ddp, name)
    on_cpu = torch.device(plan.device).type == "cpu"
    mixed = plan.precision.mixed
    scales_on_cpu = mixed == "fp16" and on_cpu  # accelerate has no scaler there
    accelerator = Accelerator(
        mixed_precision="no" if scales_on_cpu else mixed,
        cpu=on_cpu,
        dataloader_config=loader_configuration(plan.loaders),
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=ddp.backend, timeout=timedelta(seconds=ddp.timeout_s)),
            DistributedDataParallelKwargs(**options),
        ],
    )
    if scales_on_cpu:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator
