"""A dry run of the evaluation: one batch through model and metrics before step 1, so that what an evaluation yields is
known and not guessed. It has a TrainingRun of its own, so nothing of it is noticed in the real one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright import checks
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config import rules
from trainwright.errors import MetricError
from trainwright.evaluation import eval_loop
from trainwright.evaluation.dry_run import FirstBatch, Guarded
from trainwright.evaluation.streaming_metrics import is_streaming
from trainwright.hooks import is_overridden

logger = logging.getLogger(__name__)

# `trainer: Any` throughout: any Trainer, or a subclass of the user's; its hooks are called and it is not kept.


def check_evaluation(trainer: Any, ignore_keys: list[str] | None) -> None:
    """Raises what the first evaluation would raise.

    Args:
        trainer: has evaluation data.
        ignore_keys: entries of the model's output that are no predictions.

    Raises:
        DataError: an evaluation set without samples; metrics, and no labels for them.
        MetricError: `metric_for_best_model` is not among what an evaluation yields.
    """
    checks.check_sets_have_samples(trainer.eval_dataset)
    has_metrics = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
    if not has_metrics or is_overridden(trainer, "evaluate", "_evaluate"):
        return
    names = tuple(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else ()
    wanted = rules.resolve_best_metric(trainer.args, names)
    if wanted is not None:
        _find_metric(trainer, wanted, ignore_keys)
    elif not is_overridden(trainer, "evaluation_loop", "prediction_step", "_prepare_inputs", "get_eval_dataloader"):
        _find_labels(trainer, next(iter(names), None))


def names_of_metrics(trainer: Any) -> set[str]:
    """What an evaluation yields, by one over a single batch of the first evaluation set."""
    with _rehearsing(trainer):
        name = next(iter(trainer.eval_dataset), None) if isinstance(trainer.eval_dataset, dict) else None
        batch = FirstBatch(trainer.get_eval_dataloader(name))
        loss_only = True if trainer.compute_metrics is None else None
        return set(trainer.evaluation_loop(batch, "Evaluation", prediction_loss_only=loss_only).metrics or ())


def _find_metric(trainer: Any, wanted: rules.RequiredMetric, ignore_keys: list[str] | None) -> None:
    """Evaluates one batch and looks whether the metric that decides is there."""
    metrics = trainer.compute_metrics
    guard = Guarded(metrics)
    try:
        with _rehearsing(trainer):
            trainer.compute_metrics = metrics if is_streaming(metrics) else guard
            batch = FirstBatch(trainer.get_eval_dataloader(wanted.eval_set))
            output = trainer.evaluation_loop(
                batch, "Evaluation", ignore_keys=ignore_keys, metric_key_prefix=wanted.prefix
            )
    except Exception as error:
        if not guard.may_work_on_more(error):
            raise
        logger.warning(
            "metric_for_best_model=%r could not be looked for before training: compute_metrics raised %s on a "
            "single batch (%s). If it does on the whole set too, the first evaluation will end the run.",
            trainer.args.metric_for_best_model, type(error).__name__, error,
        )  # fmt: skip
        return
    finally:
        trainer.compute_metrics = metrics
    found = {*(output.metrics or ()), *(f"{wanted.prefix}_{name}" for name in rules.COMPUTED_BY_EVALUATION[1:4])}
    if wanted.name not in found:
        raise MetricError(
            f"metric_for_best_model={trainer.args.metric_for_best_model!r}, but the evaluation gives no "
            f"{wanted.name!r}; it gives {', '.join(sorted(found))}. Name one of these, or return it from "
            "compute_metrics."
        )


def _find_labels(trainer: Any, eval_set: str | None) -> None:
    with unchanged_random_states():
        inputs = FirstBatch(trainer.get_eval_dataloader(eval_set)).batch
    if not trainer.label_names or any(inputs.get(name) is None for name in trainer.label_names):
        eval_loop.raise_no_labels(trainer.label_names, inputs)


@contextmanager
def _rehearsing(trainer: Any) -> Iterator[None]:
    """Whatever is evaluated inside leaves no trace: not in modes, random states, records or callbacks."""
    dry = trainer._run.rehearsal(trainer.model)
    try:
        with trainer._using_run(dry), unchanged_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a metric about the smallness of the batch
            yield
    finally:
        dry.end_evaluation(trainer.model, None)
