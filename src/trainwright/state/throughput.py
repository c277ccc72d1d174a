"""How fast a phase went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainwright import model_facts


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Run time in seconds and rates per second since `start_time` (of `time.time()`), named after `split`."""
    runtime = time.time() - start_time
    result = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return result
    for unit, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if count is not None:
            result[f"{split}_{unit}_per_second"] = round(count / runtime, 3)
    return result


def step_logs(loss: float, grad_norm: Any, learning_rate: float, num_non_finite: int) -> dict[str, float]:
    """What is logged of training: the mean loss since the last log, and norm and rate of the last step."""
    logs = {"loss": loss}
    if grad_norm is not None:
        logs["grad_norm"] = grad_norm.item() if hasattr(grad_norm, "item") else grad_norm
    logs["learning_rate"] = learning_rate
    if num_non_finite:
        logs["num_non_finite_losses"] = num_non_finite
    return logs


def utilisation(flops: float, start_time: float, *, peak: float | None) -> dict[str, float]:
    """Share of the device's peak that went into the model (MFU: Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    Counts 6 x parameters x tokens, so recomputed activations do not raise it. Nothing where the peak is not known.
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
        self._per_token = 0
        self._main_input = ""

    def estimate(self, model: Any, inputs: Any) -> int:
        """Operations of one forward and backward pass; 0 where the batch has no main input.

        Args:
            model: the user's module.
            inputs: a collated batch; a library's own loader may give something else than a dict.
        """
        if self._model is not model:
            self._model = model
            self._per_token = 6 * model_facts.num_parameters_without_embeddings(model)
            self._main_input = model_facts.main_input_name(model)
        main_input = inputs.get(self._main_input) if isinstance(inputs, Mapping) else None
        return 0 if main_input is None else self._per_token * main_input.numel()
