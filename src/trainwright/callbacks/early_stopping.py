"""EarlyStoppingCallback: ends a run whose metric no longer improves."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainwright._types import metric_number
from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.state.control import TrainerControl
from trainwright.state.exportable_state import ExportableState
from trainwright.state.trainer_state import TrainerState

logger = logging.getLogger(__name__)


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops after `early_stopping_patience` evaluations in a row without improvement.

    Args:
        early_stopping_patience: evaluations to wait for an improvement of `metric_for_best_model`.
        early_stopping_threshold: by how much the metric must beat the best one to count as an improvement.

    Raises:
        ArgumentError: when training begins without `metric_for_best_model` or without evaluations.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def check_metric_value(
        self, args: Arguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Counts evaluations without improvement over the best metric so far.

        Args:
            args: `greater_is_better` is read.
            state: `best_metric` is read; None before the first evaluation.
            control: not used.
            metric_value: value of `metric_for_best_model` in this evaluation; NaN, None and what is not a number
                count as no improvement, also where no evaluation was better yet.
        """
        value, best = metric_number(metric_value), metric_number(state.best_metric)
        if value != value:
            self.early_stopping_patience_counter += 1
            logger.warning(
                "Early stopping counts a metric that is %s as no improvement: %d of %d.",
                reprlib.repr(metric_value), self.early_stopping_patience_counter, self.early_stopping_patience,
            )  # fmt: skip
            return
        if best != best:
            self.early_stopping_patience_counter = 0
            return
        gain = value - best if args.greater_is_better else best - value
        if gain > 0 and gain > (self.early_stopping_threshold or 0.0):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if args.metric_for_best_model is None:
            raise ArgumentError(
                "EarlyStoppingCallback watches metric_for_best_model, which is not set. Set it, for example to 'loss'."
            )
        if args.eval_strategy == "no":
            raise ArgumentError(
                "EarlyStoppingCallback needs evaluations, and eval_strategy='no'. Set it to 'steps' or 'epoch'."
            )
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the run ends with the last weights, "
                "not with the best ones."
            )

    def on_evaluate(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] = MappingProxyType({}),
        **kwargs: object,
    ) -> None:
        name = args.metric_for_best_model or "loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            logger.warning(
                "Early stopping looks for %s, which this evaluation did not give; it gave %s.",
                name, ", ".join(sorted(metrics)),
            )  # fmt: skip
            return
        self.check_metric_value(args, state, control, metrics[name])
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:  # JSON
        """Returns the settings and the counter, for a checkpoint."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
