"""Fingerprints of the values of some steps (`record_values`)."""

from __future__ import annotations

import torch

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.coerce import parse_steps
from trainwright.config.fields import get_value


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the recorder, if steps are asked for."""
    args = context.args
    steps = get_value(args, "record_values")
    if steps is None:
        return None
    from trainwright.capabilities.recorded_values.extension import ValueRecorder

    settings = {
        "seed": args.seed,
        "data_seed": args.data_seed,
        "precision": args.mixed_precision,
        "max_grad_norm": args.max_grad_norm,
        "device": str(context.engine.device),
        "torch": torch.__version__,
        "processes": args.world_size,
    }
    return ValueRecorder(
        parse_steps(steps),
        context.folder,
        context.engine,
        rank=args.process_index,
        num_processes=args.world_size,
        names=context.names,
        settings=settings,
    )


CAPABILITY = Capability(make=make)
