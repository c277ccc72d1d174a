"""A dry run of the evaluation: one batch through model and metrics before step 1, to learn its metrics."""

from __future__ import annotations

import logging
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch, has_length, metric_number
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config.behaviour import get_behaviour
from trainwright.config.rules.start import COMPUTED_BY_EVALUATION, RequiredMetric, resolve_best_metric
from trainwright.data.prepared_dataloader import inner_dataloader
from trainwright.errors import DataError, MetricError, TrainwrightError
from trainwright.evaluation import eval_loop
from trainwright.evaluation.outputs import make_record
from trainwright.run import checks
from trainwright.run.current import using_run
from trainwright.run.internals import Internals
from trainwright.support.hooks import is_overridden

logger = logging.getLogger(__name__)

# A metric that fails with one of these fails on any data. Other errors may be due to the small batch (a missing class,
# the variance of one value).
HOPELESS = (NameError, AttributeError, TypeError, ImportError, TrainwrightError)

# `trainer: Any` throughout: any Trainer, or a subclass of the user's; its hooks are called and it is not stored.


def check_evaluation(trainer: Any, ignore_keys: list[str] | None) -> bool:
    """Raises the errors of the first evaluation: DataError for unusable sets, MetricError for a missing metric.

    Returns True if `compute_metrics` was called for it. It is not with `reproduce="transformers"`.
    """
    checks.check_sets_have_samples(trainer.args, trainer.eval_dataset)
    if not is_overridden(trainer, "evaluate", "_evaluate", "get_eval_dataloader"):
        sets = trainer.eval_dataset
        for dataset in sets.values() if isinstance(sets, dict) else [sets]:
            checks.check_is_dataset(dataset, "Evaluation")
    has_metrics = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
    if not has_metrics or is_overridden(trainer, "evaluate", "_evaluate"):
        return False
    if not get_behaviour(trainer.args).rehearses_evaluation:
        return False
    names = tuple(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else ()
    wanted = resolve_best_metric(trainer.args, names)
    if wanted is not None:
        return _find_metric(trainer, wanted, ignore_keys)
    if is_overridden(trainer, "evaluation_loop", "prediction_step", "_prepare_inputs", "get_eval_dataloader"):
        return False
    return _look_at_metrics(trainer, next(iter(names), None), ignore_keys)


def find_metric_names(trainer: Any) -> set[str]:
    """Returns the names of an evaluation's metrics, from a single batch of the first evaluation set.

    A trainer whose `log` adds metrics names them in `take_logged_metrics`.
    """
    name = next(iter(trainer.eval_dataset), None) if isinstance(trainer.eval_dataset, dict) else None
    found = set(_measure_metrics(trainer, _first_batch(trainer, name), "eval", None))
    take_logged_metrics = getattr(trainer, "take_logged_metrics", None)
    return found if take_logged_metrics is None else found | take_logged_metrics()


def _find_metric(trainer: Any, wanted: RequiredMetric, ignore_keys: list[str] | None) -> bool:
    """Evaluates one batch and checks that the deciding metric is there; returns True if it was computed."""
    metrics = trainer.compute_metrics
    raised: list[Exception] = []
    is_called = eval_loop.is_streaming(metrics)

    def remembers_errors(*args: object, **kwargs: object) -> dict[str, Any]:
        nonlocal is_called
        is_called = True
        try:
            return metrics(*args, **kwargs)  # type: ignore[no-any-return]
        except Exception as error:
            raised.append(error)
            raise

    try:
        trainer.compute_metrics = metrics if eval_loop.is_streaming(metrics) else remembers_errors
        found = _measure_metrics(trainer, _first_batch(trainer, wanted.eval_set), wanted.prefix, ignore_keys)
    except Exception as error:
        if error not in raised or isinstance(error, HOPELESS):
            raise
        logger.warning(
            "metric_for_best_model=%r could not be checked before training: compute_metrics raised %s on a "
            "single batch (%s). If it does on the whole set too, the first evaluation will end the run.",
            trainer.args.metric_for_best_model,
            type(error).__name__,
            error,
        )
        return is_called
    finally:
        trainer.compute_metrics = metrics
    names = {*found, *(f"{wanted.prefix}_{name}" for name in COMPUTED_BY_EVALUATION[1:4])}
    if wanted.name not in names:
        raise MetricError(
            f"metric_for_best_model={trainer.args.metric_for_best_model!r}, but the evaluation returns no "
            f"{wanted.name!r}; it returns {', '.join(sorted(names))}. Choose one of these, or return it from "
            "compute_metrics."
        )
    value = found.get(wanted.name, 0.0)
    if not isinstance(value, float) and value is not None and (number := metric_number(value)) != number:
        raise MetricError(
            f"metric_for_best_model={trainer.args.metric_for_best_model!r}, but the evaluation returns "
            f"{wanted.name}={reprlib.repr(value)}, which is not a number ({type(value).__name__}). Return a number "
            "under this name from compute_metrics, or choose another metric."
        )
    return is_called


def _look_at_metrics(trainer: Any, eval_set: str | None, ignore_keys: list[str] | None) -> bool:
    """Checks for labels, and reports metrics that cannot be recorded. Other errors are left to the evaluation.

    Returns True if the metrics were computed.
    """
    dataset = trainer.eval_dataset if eval_set is None else trainer.eval_dataset[eval_set]
    if has_length(dataset) and len(dataset) == 0:  # its evaluation yields no metric, and says so
        return False
    batch = _first_batch(trainer, eval_set)
    has_names = isinstance(batch.batch, Mapping)
    label_names = Internals(trainer).label_names_in(batch.batch) if has_names else trainer.label_names
    if not (has_names and label_names) or any(batch.batch.get(name) is None for name in label_names):
        eval_loop.warn_no_labels(label_names, batch.batch)
        return False
    try:
        _measure_metrics(trainer, batch, "eval" if eval_set is None else f"eval_{eval_set}", ignore_keys)
    except TrainwrightError:
        raise
    except Exception as error:
        logger.info("The metrics of a single batch could not be checked before training: %r", error)
    return True


def _first_batch(trainer: Any, eval_set: str | None) -> FirstBatch:
    with unchanged_random_states():
        return FirstBatch(trainer.get_eval_dataloader(eval_set))


def _measure_metrics(trainer: Any, batch: FirstBatch, prefix: str, ignore_keys: list[str] | None) -> dict[str, Any]:
    """Returns the metrics of one batch; reports values that cannot be recorded."""
    with _rehearsing(trainer):
        how = {"ignore_keys": ignore_keys, "metric_key_prefix": prefix}
        loss_only = True if trainer.compute_metrics is None else None
        output = trainer.evaluation_loop(batch, "Evaluation", prediction_loss_only=loss_only, **how)
    metrics = dict(output.metrics or {})
    make_record(metrics, Internals(trainer).run.progress.warned.metrics)
    return metrics


@contextmanager
def _rehearsing(trainer: Any) -> Iterator[None]:
    """Makes evaluations inside leave no trace: in modes, random states, records or callbacks."""
    dry = Internals(trainer).run.rehearsal(trainer.model)
    try:
        with using_run(trainer, dry), unchanged_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a metric's warnings about the small batch
            yield
    finally:
        dry.end_evaluation(trainer.model, None)


def first_batches(dataloader: Iterable[Batch], number: int) -> Iterator[Batch]:
    """Yields the first `number` batches of a dataloader, read in this process: workers would read ahead."""
    indices = getattr(dataloader, "batch_sampler", None)
    dataset = getattr(dataloader, "dataset", None)
    if isinstance(dataloader, DataLoader) and indices is not None and not isinstance(dataset, IterableDataset):
        batches = [list(batch) for batch in islice(iter(indices), number)]
        inner = inner_dataloader(dataloader)
        dataloader = DataLoader(inner.dataset, batch_sampler=batches, collate_fn=inner.collate_fn)
    return islice(iter(dataloader), number)


class FirstBatch:
    """Iterates over the first batch of a dataloader; DataError if there is none."""

    def __init__(self, dataloader: Iterable[Batch]) -> None:
        for batch in first_batches(dataloader, 1):
            self.batch: Batch = batch
            return
        raise DataError("The evaluation set is empty: its dataloader gave no batch. Give it at least one sample.")

    def __iter__(self) -> Iterator[Batch]:
        return iter([self.batch])
