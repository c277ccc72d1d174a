"""NEFTune: noise on the embeddings while training (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import ModelError
from trainwright.model_facts import core_model

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float) -> Iterator[None]:
    """Adds uniform noise of at most `alpha / sqrt(tokens x dimensions)` to the input embeddings, in training mode only.

    Raises:
        ModelError: the model does not say which of its layers is the embedding.
    """
    find = getattr(core_model(model), "get_input_embeddings", None)
    if find is None:
        raise ModelError(
            f"neftune_noise_alpha={alpha} adds noise to the input embeddings, and {type(model).__name__} has no "
            "get_input_embeddings() to find them by. Define it, or leave neftune_noise_alpha unset."
        )

    handle = find().register_forward_hook(_noise(alpha))
    try:
        yield
    finally:
        handle.remove()


def activate_neftune(
    model: nn.Module,
    neftune_noise_alpha: float,
    accelerator: Any = None,  # accelerate's, imported in engine/ only
) -> RemovableHandle:
    """Adds the same noise until the returned handle is removed, as the original's function of this name."""
    inner = model if accelerator is None else accelerator.unwrap_model(model)
    embeddings = core_model(inner).get_input_embeddings()
    embeddings.neftune_noise_alpha = neftune_noise_alpha
    handle: RemovableHandle = embeddings.register_forward_hook(_noise(neftune_noise_alpha))
    return handle


def _noise(alpha: float) -> Callable[[torch.nn.Module, object, torch.Tensor], torch.Tensor]:
    def add_noise(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = alpha / math.sqrt(output.size(1) * output.size(2))
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    return add_noise
