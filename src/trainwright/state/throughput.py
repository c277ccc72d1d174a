"""Speed of a phase: run time, rates, input tokens of batches, floating-point operations."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright._types import Model
from trainwright.support import model_facts

logger = logging.getLogger(__name__)

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # models about which it was said: once, not at each batch


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Returns run time and rates of a phase.

    Args:
        split: prefix of the names, such as "train".
        start_time: start of the phase, from `time.time()`.
        num_samples: samples of the phase; None for no rate of them.
        num_steps: steps of the phase; None for no rate of them.
        num_tokens: tokens of the phase; None for no rate of them.

    Returns:
        `<split>_runtime` in seconds, and `<split>_samples_per_second`, ... of the numbers that are given.
    """
    runtime = time.time() - start_time
    result = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return result
    for unit, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if count is not None:
            result[f"{split}_{unit}_per_second"] = round(count / runtime, 3)
    return result


def step_logs(loss: float, grad_norm: Any, learning_rate: float, num_non_finite: int) -> dict[str, float]:
    """Returns the values of a training log: mean loss since the last log, norm and rate of the last step."""
    logs = {"loss": loss}
    if grad_norm is not None:
        logs["grad_norm"] = grad_norm.item() if hasattr(grad_norm, "item") else grad_norm
    logs["learning_rate"] = learning_rate
    if num_non_finite:
        logs["num_non_finite_losses"] = num_non_finite
    return logs


def utilisation(flops: float, start_time: float, *, peak: float | None) -> dict[str, float]:
    """Share of the device's peak that went into the model (MFU: Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    Counts 6 x parameters x tokens, so recomputed activations do not raise it. Nothing if the peak is unknown.
    """
    runtime = time.time() - start_time
    if peak is None or flops == 0 or runtime <= 0:
        return {}
    return {"train_model_flops_utilization": round(flops / runtime / peak, 4)}


class FlopEstimator:
    """Floating-point operations of micro-batches: 6 x parameters (without embeddings) x tokens.

    Counting parameters walks over the model, so this happens once for each model.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._of_model: Callable[[Any], float] | None = None
        self._per_token = 0
        self._main_input = ""

    def estimate(self, model: Model, inputs: Any) -> float:
        """Operations of one forward and backward pass, reported by the model if it has `floating_point_ops`.

        0 if the batch has no main input; loaders of libraries may yield other types than dicts.
        """
        if self._model is not model:
            own = getattr(model, "floating_point_ops", None)
            is_brought = callable(own) and not str(getattr(own, "__module__", "")).startswith("transformers.")
            self._model = model
            self._of_model = own if is_brought else None
            self._per_token = 6 * model_facts.num_parameters_without_embeddings(model)
            self._main_input = model_facts.main_input_name(model)
        if self._of_model is not None:
            return self._of_model(inputs)
        is_named = type(inputs) is dict or isinstance(inputs, Mapping)
        main_input = inputs.get(self._main_input) if is_named else None
        return 0 if main_input is None else self._per_token * main_input.numel()


def count_tokens(inputs: Mapping[str, Any], model: Model, processing_class: Any, *, mode: str) -> torch.Tensor | int:
    """Input tokens of a batch: "all" of them, or the "non_padding" ones (counted on their device, not read back)."""
    name = getattr(model, "main_input_name", "input_ids")
    if not isinstance(inputs, Mapping) or name not in inputs:
        _tell(
            model,
            f"Input tokens are not counted: the batch has no {name!r}. Set main_input_name on the model's class to the "
            "entry that holds them.",
        )
        return 0
    if mode == "non_padding":
        packed = _select_real_tokens(inputs)
        if packed is not None:
            return packed
        if "attention_mask" in inputs:
            return inputs["attention_mask"].sum()  # type: ignore[no-any-return]
        pad = getattr(processing_class, "pad_token_id", None)
        if pad is not None:
            return (inputs[name] != pad).sum()  # type: ignore[no-any-return]
        _tell(model, "Padding cannot be distinguished from tokens (no attention_mask, no pad token); all are counted.")
    return inputs[name].numel()  # type: ignore[no-any-return]


def _tell(model: Model, text: str) -> None:
    if model not in _told:
        _told.add(model)
        logger.warning("%s", text)


def _select_real_tokens(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Tokens of packed rows; None for other batches.

    Padding at a row's end repeats one position id that neither starts a sample nor continues the last one.
    """
    mask = inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if positions is None or (mask is not None and mask.ndim == 2):
        return None
    first = positions[:, :1]
    continues = positions.diff(dim=-1, prepend=first - 1) == 1
    real: torch.Tensor = (continues | (positions == first)).sum()
    return real
