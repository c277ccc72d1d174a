"""How accelerate treats a loader that somebody gives to `accelerator.prepare`, and ours where they are dispatched."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from trainwright.config.plans import LoadersOfOthers


def loader_configuration(plan: LoadersOfOthers) -> Any:
    """The plan as accelerate's own configuration."""
    from accelerate import DataLoaderConfiguration

    return DataLoaderConfiguration(**asdict(plan))


def dispatched(dataloader: Any, plan: LoadersOfOthers, device: torch.device) -> Any:
    """The main process reads each batch and sends it to all, which take their parts of it.

    The parts are equal: what a last batch lacks for that is filled up with samples of the first one.
    """
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(
        dataloader, device, split_batches=True, put_on_device=True, dispatch_batches=True,
        use_seedable_sampler=False, non_blocking=plan.non_blocking,
    )  # fmt: skip
