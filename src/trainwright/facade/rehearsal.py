"""What is found out about evaluations before step 1: data, labels, and the names of what they yield."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from trainwright import assemble, checks
from trainwright.config import rules
from trainwright.errors import MetricError
from trainwright.evaluation import eval_loop
from trainwright.evaluation.dry_run import FirstBatch, Guarded
from trainwright.evaluation.streaming_metrics import is_streaming
from trainwright.facade.evaluation import EvaluationHooks
from trainwright.optim import train_eval_mode

logger = logging.getLogger(__name__)


class RehearsalHooks(EvaluationHooks):
    """Evaluates one batch before training, where something depends on it, and leaves no trace of it."""

    def _rehearse_evaluation(self, ignore_keys: list[str] | None = None) -> None:
        """Raises what the first evaluation would raise, before step 1.

        Raises:
            DataError: an evaluation set without samples; metrics, and no labels for them.
            MetricError: `metric_for_best_model` is not among what an evaluation yields.
        """
        if self.args.eval_strategy == "no" or self.eval_dataset is None:
            return
        checks.check_sets_have_samples(self.eval_dataset)
        has_metrics = self.compute_metrics is not None and not self.args.prediction_loss_only
        if not has_metrics or not self._are_ours("evaluate", "_evaluate"):
            return
        names = tuple(self.eval_dataset) if isinstance(self.eval_dataset, dict) else ()
        wanted = rules.resolve_best_metric(self.args, names)
        if wanted is not None:
            self._find_metric(wanted, ignore_keys)
        elif self._are_ours("evaluation_loop", "prediction_step", "_prepare_inputs", "get_eval_dataloader"):
            self._find_labels(next(iter(names), None))

    def _find_metric(self, wanted: rules.Wanted, ignore_keys: list[str] | None) -> None:
        """Evaluates one batch and looks whether the metric that decides is there."""
        metrics = self.compute_metrics
        guard = Guarded(metrics)
        try:
            with self._rehearsing():
                self.compute_metrics = metrics if is_streaming(metrics) else guard
                batch = FirstBatch(self.get_eval_dataloader(wanted.eval_set))
                output = self.evaluation_loop(
                    batch, "Evaluation", ignore_keys=ignore_keys, metric_key_prefix=wanted.prefix
                )
        except Exception as error:
            if not guard.may_work_on_more(error):
                raise
            logger.warning(
                "metric_for_best_model=%r could not be looked for before training: compute_metrics raised %s on a "
                "single batch (%s). If it does on the whole set too, the first evaluation will end the run.",
                self.args.metric_for_best_model, type(error).__name__, error,
            )  # fmt: skip
            return
        finally:
            self.compute_metrics = metrics
        found = {*(output.metrics or ()), *(f"{wanted.prefix}_{name}" for name in rules.COMPUTED_BY_EVALUATION[1:4])}
        if wanted.name not in found:
            raise self._no_such_metric(wanted.name, found)

    def _names_of_metrics(self) -> set[str]:
        """What an evaluation yields, by one over a single batch of the first evaluation set."""
        with self._rehearsing():
            name = next(iter(self.eval_dataset), None) if isinstance(self.eval_dataset, dict) else None
            batch = FirstBatch(self.get_eval_dataloader(name))
            loss_only = True if self.compute_metrics is None else None
            return set(self.evaluation_loop(batch, "Evaluation", prediction_loss_only=loss_only).metrics or ())

    def _find_labels(self, eval_set: str | None) -> None:
        with assemble.untouched_randomness():
            inputs = FirstBatch(self.get_eval_dataloader(eval_set)).batch
        if not self.label_names or any(inputs.get(name) is None for name in self.label_names):
            eval_loop.raise_no_labels(self.label_names, inputs)

    @contextlib.contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """Whatever is evaluated inside leaves no trace: not in modes, random states, records or callbacks."""
        pause, self._is_rehearsing = train_eval_mode.EvalModeGuard(self.model, None), True
        try:
            with assemble.untouched_randomness(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a metric about the smallness of the batch
                yield
        finally:
            self._is_rehearsing = False
            pause.end(self.model, None)

    def _are_ours(self, *names: str) -> bool:
        """Whether none of these hooks is overridden outside of this package."""
        return all(getattr(type(self), name).__module__.startswith("trainwright.") for name in names)

    def _no_such_metric(self, name: str, found: Any) -> MetricError:
        return MetricError(
            f"metric_for_best_model={self.args.metric_for_best_model!r}, but the evaluation gives no {name!r}; it "
            f"gives {', '.join(sorted(found))}. Name one of these, or return it from compute_metrics."
        )
