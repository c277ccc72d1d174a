"""How many input tokens a batch has."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # models about which it was said: once, not at each batch


def count_tokens(inputs: Mapping[str, Any], model: Any, processing_class: Any, *, mode: str) -> torch.Tensor | int:
    """Input tokens of a batch: "all" of them, or the "non_padding" ones (counted on their device, not read back)."""
    name = getattr(model, "main_input_name", "input_ids")
    if name not in inputs:
        _tell(
            model,
            f"Input tokens are not counted: the batch has no {name!r}. Set main_input_name on the model's class to the "
            "entry that holds them.",
        )
        return 0
    if mode == "non_padding":
        packed = _real_tokens_of_rows(inputs)
        if packed is not None:
            return packed
        if "attention_mask" in inputs:
            return inputs["attention_mask"].sum()  # type: ignore[no-any-return]
        pad = getattr(processing_class, "pad_token_id", None)
        if pad is not None:
            return (inputs[name] != pad).sum()  # type: ignore[no-any-return]
        _tell(model, "Padding cannot be told from tokens (no attention_mask, no pad token); all are counted.")
    return inputs[name].numel()  # type: ignore[no-any-return]


def _tell(model: Any, text: str) -> None:
    if model not in _told:
        _told.add(model)
        logger.warning("%s", text)


def _real_tokens_of_rows(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Tokens of packed rows; None for other batches.

    Padding at a row's end repeats one position id that neither starts a sample nor continues the last one.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if positions is None or (mask is not None and mask.ndim == 2):
        return None
    first = positions[:, :1]
    continues = positions.diff(dim=-1, prepend=first - 1) == 1
    real: torch.Tensor = (continues | (positions == first)).sum()
    return real
