"""Models made in parts: while arguments that ask for ZeRO-3 live, transformers makes each parameter in its parts.

Only says so, and starts what that needs. How such a model trains and is saved is left to the engine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.config import resolve
from trainwright.config.deepspeed_config import get
from trainwright.distributed.process_group import start_alone, start_group
from trainwright.distributed.world import configured_backend, world_of
from trainwright.errors import MissingPackageError

MARKS = "transformers.integrations.deepspeed"


def mark(args: Any) -> Any:
    """What `from_pretrained` and `from_config` look for, for as long as somebody holds it.

    None where parameters have no parts: without stage 3, in a process that was started alone, or where DeepSpeed is
    not installed, which is said when a trainer is made. The process group is started, since parts need one.
    """
    if not args.deepspeed and configured_backend() != "deepspeed":
        return None
    world = world_of(args)
    if not world.launched or importlib.util.find_spec("deepspeed") is None:
        return None
    plan = resolve.deepspeed(args)
    if plan is None or get(plan.config, "zero_optimization.stage") != 3:
        return None
    load(on_cpu=world.device.type == "cpu")
    if world.world_size > 1:
        start_group(world, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
    else:
        start_alone(world.device.type, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
    import deepspeed.comm
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)  # it takes the group that is there

    return HfDeepSpeedConfig(plan.config)  # type: ignore[no-untyped-call]


@contextmanager
def whole_models() -> Iterator[None]:
    """Models made meanwhile are whole, whatever arguments live."""
    marks = sys.modules.get(MARKS)
    before = None if marks is None else _marked(marks)
    if marks is None or before is None:
        yield
        return
    marks.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        marks.set_hf_deepspeed_config(before)


@contextmanager
def keeping_the_mark() -> Iterator[None]:
    """What was marked before is so again afterwards; accelerate marks what its accelerator holds, and no longer."""
    before = _marked(sys.modules[MARKS]) if MARKS in sys.modules else None
    try:
        yield
    finally:
        if before is not None:
            sys.modules[MARKS].set_hf_deepspeed_config(before)


def _marked(marks: Any) -> Any:
    reference = marks._hf_deepspeed_config_weak_ref
    return None if reference is None else reference()


def load(*, on_cpu: bool) -> None:
    """Imports DeepSpeed for the device that it will work on.

    Raises:
        MissingPackageError: DeepSpeed is not installed.
    """
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed.ops
    except ImportError as error:
        raise MissingPackageError(
            "deepspeed=... needs the deepspeed package: pip install setuptools wheel ninja, then "
            "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
        ) from error
    if on_cpu:  # it would compile an operator for shared memory when the group starts, and wait for the compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
