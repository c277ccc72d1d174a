"""fp8 through accelerate's recipes: torchao's where it is installed, else what accelerate finds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.errors import MissingPackageError


@contextmanager
def fp8_explained(mixed: str) -> Iterator[None]:
    """Around the making of an Accelerator: says what to install where none of the packages with a recipe is there.

    Raises:
        MissingPackageError: in place of accelerate's error.
    """
    try:
        yield
    except (ImportError, ValueError) as error:
        if mixed != "fp8":
            raise
        raise MissingPackageError(
            f"Mixed precision fp8 was asked for, and accelerate cannot do it: {error} "
            "Install torchao (pip install torchao) or transformer-engine, or use bf16."
        ) from error


def fp8_recipes() -> list[Any]:
    """torchao's recipe, with weights that stay plain tensors: its default keeps them ready for sharding."""
    if importlib.util.find_spec("torchao") is None:
        return []
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    return [AORecipeKwargs(config=Float8LinearConfig(enable_fsdp_float8_all_gather=False))]
