"""ZeRO-3: transformers partitions the parameters of a model while it makes it. The arguments decide when."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trainwright.errors import needs_package

MARKER_MODULE = "transformers.integrations.deepspeed"


def mark(config: Mapping[str, Any], *, on_cpu: bool) -> Any:  # transformers' HfDeepSpeedConfig
    """Makes transformers partition new models while the returned object exists.

    `config` is DeepSpeed's, with "auto" replaced by every known value.
    """
    load(on_cpu=on_cpu)
    import deepspeed.comm
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)  # with the group that exists
    return HfDeepSpeedConfig(dict(config))  # type: ignore[no-untyped-call]


@contextmanager
def whole_models() -> Iterator[None]:
    """Models made within the context are whole, whatever is marked."""
    with keeping_the_mark() as module:
        if module is not None:
            module.unset_hf_deepspeed_config()
        yield


@contextmanager
def keeping_the_mark() -> Iterator[ModuleType | None]:
    """Restores the marker at the end, which accelerate replaces; yields its module, or None if nothing is marked."""
    module = sys.modules.get(MARKER_MODULE)
    reference = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    before = None if reference is None else reference()
    try:
        yield None if before is None else module
    finally:
        if module is not None and before is not None:
            module.set_hf_deepspeed_config(before)


def load(*, on_cpu: bool) -> None:
    """Imports DeepSpeed for the CPU or for GPUs; MissingPackageError if it is not installed."""
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with needs_package(
        "deepspeed=... needs the deepspeed package: pip install setuptools wheel ninja, then "
        "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
    ):
        import deepspeed.ops
    if on_cpu:  # otherwise it compiles an operator for shared memory when the group starts
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
