"""fp8 through accelerate's recipes: torchao's where it is installed, else what accelerate finds."""

from __future__ import annotations

import importlib.util
from typing import Any

from trainwright.errors import MissingPackageError


def fp8_accelerator(*, cpu: bool) -> Any:
    """An Accelerator that trains linear layers in fp8.

    Raises:
        MissingPackageError: none of the packages with a recipe is installed.
    """
    from accelerate import Accelerator

    try:
        return Accelerator(mixed_precision="fp8", cpu=cpu, kwargs_handlers=_recipes())
    except (ImportError, ValueError) as error:
        raise MissingPackageError(
            f"Mixed precision fp8 was asked for, and accelerate cannot do it: {error} "
            "Install torchao (pip install torchao) or transformer-engine, or use bf16."
        ) from error


def _recipes() -> list[Any]:
    """torchao's recipe, with weights that stay plain tensors: its default keeps them ready for sharding."""
    if importlib.util.find_spec("torchao") is None:
        return []
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    return [AORecipeKwargs(config=Float8LinearConfig(enable_fsdp_float8_all_gather=False))]
