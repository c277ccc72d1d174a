"""Liger: fused GPU kernels in place of a model's own layers (liger-kernel)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.errors import MissingPackageError
from trainwright.model_facts import core_model

if TYPE_CHECKING:
    from torch import nn


def apply_liger_kernel(model: nn.Module, kernel_config: dict[str, bool] | None) -> None:
    """Puts Liger's kernels into a model; `kernel_config` switches single ones on and off.

    It stays: Liger has no way back for an instance.

    Raises:
        MissingPackageError: liger-kernel is not installed.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise MissingPackageError(
            "use_liger_kernel=True needs the liger-kernel package (and a GPU that Triton supports): "
            "pip install liger-kernel"
        ) from error
    _apply_liger_kernel_to_instance(model=core_model(model), **(kernel_config or {}))
