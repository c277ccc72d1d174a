"""The evaluation loop: batches through `prediction_step`, one after the other, and the metrics of their results.

With several processes, a process that has run out of samples gets a placeholder batch (`TailBatch` without samples), so
that it stays in step with the others. The results of a placeholder do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainwright._types import Batch, Nested, TailBatch, has_length, plain_numbers, python_number
from trainwright.config.plans import EvalPlan
from trainwright.errors import DataError
from trainwright.evaluation.nested_collector import ArrayStorage, NestedCollector
from trainwright.evaluation.outputs import EvalLoopOutput, EvalPrediction, find_target_names, quote_names
from trainwright.evaluation.sample_lists import ResultGatherer, SampleList, as_plain_lists, map_results
from trainwright.state.progress import Progress
from trainwright.state.recorded_metrics import RecordedMetrics
from trainwright.support.hooks import EvalHooks, Events
from trainwright.support.loss_normalization import LossRule
from trainwright.support.replaced import current
from trainwright.support.signatures import read_parameters
from trainwright.support.tensor_tree import count_samples, nested_numpify

logger = logging.getLogger(__name__)

Step: TypeAlias = tuple[torch.Tensor | None, Nested, Nested]  # loss, logits and labels of a batch
# Names of the arguments of a metric's `update`.
PREDICTIONS = ("predictions", "preds", "pred", "y_pred", "logits", "input")
REFERENCES = ("references", "target", "targets", "labels", "label_ids", "y_true")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalContext:
    """The parts of one evaluation."""

    plan: EvalPlan
    model: nn.Module  # as the engine prepared it, in evaluation mode
    rule: LossRule
    events: Events
    gather: Callable[[Nested], Nested]  # collects a value of all processes, in the order of samples
    total: Callable[[torch.Tensor], torch.Tensor]  # sums a tensor over all processes
    collect: Callable[[torch.Tensor], torch.Tensor]  # stacks a tensor of each process along a new first dimension
    label_names: Sequence[str]  # entries of a batch that are labels
    gather_objects: Callable[[Any], list[Any]] | None = None  # any object of all processes; None: there is one process
    device: torch.device | None = None
    main_input: str = "input_ids"  # entry of a batch that metrics get as `inputs`
    compute_metrics: Callable[..., dict[str, Any]] | None = None  # or an object fed by batches; None: loss only
    preprocess_logits: Callable[[Nested, Nested], Nested] | None = None  # (logits, labels) -> logits to keep
    loss_only: bool = False
    needs_labels: bool = False  # whether metrics without labels are worth a warning (evaluation) or not (prediction)
    keeps_results: bool = True
    ignore_keys: list[str] | None = None
    batch_size: int = 1  # samples of a batch that does not show its own number
    loss_rows: int | None = None  # rows that a batch's loss counts for; None: the rows of the batch

    @property
    def wants_labels(self) -> bool:
        """Whether there are metrics to compute, which need labels."""
        return self.compute_metrics is not None and not self.loss_only


def evaluation_loop(
    session: EvalContext, run: Progress, hooks: EvalHooks, dataloader: Iterable[Batch], *, prefix: str
) -> EvalLoopOutput:
    """Runs the model over a dataloader; metrics are named `<prefix>_...`, and arrays are None unless kept."""
    known = _num_samples(dataloader, hooks)
    results = PredictionAccumulator(session, known, run.recorded)
    run.interrupts.open()  # nothing is half done while evaluating: a signal may end it at once
    try:
        num_seen, found_labels = _collect(session, run, hooks, dataloader, results, known=known)
    finally:
        run.interrupts.close()
    if known is None:
        num_seen = int(session.total(torch.tensor(num_seen)))
    if num_seen == 0 and known in (None, 0):
        logger.warning("The evaluation set is empty: its dataloader gave no batch, so there is no loss and no metric.")
    return results.output(
        prefix,
        num_samples=num_seen if known is None else known,
        found_labels=found_labels,
        places=_read_places(dataloader),
    )


def _read_places(dataloader: object) -> np.ndarray[Any, Any] | None:
    """Returns the indices of the samples in the order of a dataloader that sorts them; None if it does not sort."""
    sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
    places = getattr(sampler, "places", None)
    return places if isinstance(places, np.ndarray) else None


def _collect(
    session: EvalContext,
    run: Progress,
    hooks: EvalHooks,
    dataloader: Iterable[Batch],
    results: PredictionAccumulator,
    *,
    known: int | None,
) -> tuple[int, bool]:
    """Runs all batches; returns the number of samples of this process, and whether there were labels.

    `known` is the number of samples of all processes, if known.
    """
    num_seen = 0
    found_labels = False
    lacking: Batch | None = None  # a batch of which labels or a loss were expected, and none came
    batches = _with_last(dataloader) if session.plan.streams_metrics else zip(dataloader, repeat(False))
    for inputs, is_last in batches:
        counts = not isinstance(inputs, TailBatch) or inputs.num_samples > 0
        rows = count_samples(inputs)
        if rows is None:  # an object without rows: a whole batch, or the rest of the data
            rows = session.batch_size if known is None else min(session.batch_size, max(known - num_seen, 0))
        num_seen += rows if counts else 0
        run.recorded.batch = inputs
        run.recorded.items = None
        step = hooks.prediction_step(session.model, inputs, session.loss_only, ignore_keys=session.ignore_keys)
        run.recorded.batch = None
        found_labels = found_labels or step[2] is not None
        if session.needs_labels and step[2] is None and (step[0] is None or session.wants_labels):
            lacking = lacking or inputs
        shown = None
        if "inputs" in session.plan.include:  # the whole batch for metrics that take batches, else the main input
            shown = hooks._prepare_input(inputs if session.plan.streams_metrics else inputs[session.main_input])
        results.add(inputs, step, rows=rows or 1, shown=shown, counts=counts, is_last=is_last)
        del step  # frees this batch's output before the next batch is computed
        session.events.fire("on_prediction_step", run)
        run.interrupts.passes()
    if lacking is not None and session.wants_labels:
        warn_no_labels(session.label_names, lacking)
    elif lacking is not None:
        _warn_no_loss(find_target_names(lacking, session.label_names), run.warned.targets)
    return num_seen, found_labels


def warn_no_labels(label_names: Sequence[str], inputs: Batch) -> None:
    """Says that an evaluation has no metrics because its batches have no labels."""
    logger.warning(
        "compute_metrics is not called, because the evaluation batches have no labels: looked for %s; found %s. Rename "
        "the column, or name it with label_names=%s.",
        ", ".join(label_names) or "labels, of which this model takes none",
        ", ".join(inputs) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}",
        quote_names(find_target_names(inputs, label_names)) or "[...]",
    )


def _warn_no_loss(targets: list[str], named: set[str]) -> None:
    """Says once that evaluations have no loss although their batches have what may be labels."""
    if not targets or named.issuperset(targets):
        return
    named.update(targets)
    logger.warning(
        "The evaluation has no loss, because its batches have no labels by a name that is known; %s may be one. If so, "
        "set label_names=%s.",
        ", ".join(targets),
        quote_names(targets),
    )


def _num_samples(dataloader: object, hooks: EvalHooks) -> int | None:
    dataset = getattr(dataloader, "dataset", None)
    if has_length(dataset):
        return len(dataset)
    return hooks.num_examples(dataloader) if has_length(dataloader) else None


def has_known_end(dataloader: object, *, is_read_apart: bool) -> bool:
    """Returns whether accelerate would cut the last batch to its samples.

    It cuts for its own dataloaders: of a dataset, of a stream with a length, and of a stream that one process reads
    for all, so unless each reads for itself (`is_read_apart`).
    """
    if getattr(dataloader, "total_batch_size", None) is None:
        return False
    dataset = getattr(dataloader, "dataset", None)
    return not (is_read_apart and isinstance(dataset, IterableDataset)) or has_length(dataset)


def _with_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yields each batch, and whether it is the last one."""
    iterator = iter(batches)
    following = next(iterator, None)
    while (current := following) is not None:
        following = next(iterator, None)
        yield current, following is None


# -- losses, predictions and metrics of the batches ------------------------------------------------------------------


@dataclass(slots=True)
class LossAverage:
    """Mean loss of an evaluation, weighted by the number of items of each batch; read back once, at the end.

    Worked example: batches of 3 and 1 label tokens with mean losses 2.0 and 6.0 come to (3 * 2.0 + 1 * 6.0) / 4 = 3.0,
    the mean over tokens; the mean of the two means would be 4.0. Processes add up their sums and numbers of items.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | float] = field(default_factory=list)

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        loss = loss.detach() if loss.requires_grad else loss
        loss = loss if loss.dtype is torch.float32 else loss.float()
        self.values.append(loss if loss.dim() == 0 else loss.mean())
        self.weights.append(weight)

    def sums(self) -> torch.Tensor:
        """Returns sum and weight (3, 2) of all losses, of the finite ones, and of all without their weights."""
        if not self.values:
            return torch.zeros(3, 2, dtype=torch.float64)
        values = torch.stack(self.values).cpu().double()
        weights = torch.stack([torch.as_tensor(w).cpu() for w in self.weights]).double()
        counts = weights > 0
        chosen = (counts, counts & torch.isfinite(values))
        sums = [torch.stack([(values[some] * weights[some]).sum(), weights[some].sum()]) for some in chosen]
        sums.append(torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)]))
        return torch.stack(sums)


def compute_mean(sums: torch.Tensor, *, skip_non_finite: bool) -> float | None:
    """Returns the mean loss of the `sums` of all processes, None without one; `skip_non_finite`: of finite ones."""
    every, only_finite, unweighted = sums
    result = only_finite if skip_non_finite and only_finite[1] > 0 else every
    result = result if result[1] > 0 else unweighted
    return float(result[0] / result[1]) if result[1] > 0 else None


def _average_rows(losses: list[torch.Tensor], *, skip_non_finite: bool) -> float:
    """The original's `eval_loss`: in the type of the losses, added up in numpy's order."""
    values = np.concatenate([nested_numpify(loss) for loss in losses])
    finite = np.isfinite(values)
    return float((values[finite] if skip_non_finite and finite.any() else values).mean())


class PredictionAccumulator:
    """Collects losses, predictions and labels of one evaluation, as far as metrics or the caller need them."""

    def __init__(self, session: EvalContext, num_samples: int | None, recorded: RecordedMetrics) -> None:
        plan = session.plan
        self.session = session
        self._recorded = recorded
        self._mean = LossAverage()
        self._rows: list[torch.Tensor] = []  # the loss of its batch for each row, with `averages_batches`
        self._metrics: dict[str, Any] = {}
        self._stream: StreamingMetric | None = None
        metrics = session.compute_metrics
        if is_streaming(metrics) and not session.loss_only:
            self._stream = StreamingMetric(metrics, session.device)
        self._by_batch = self._stream is None and plan.streams_metrics and metrics is not None
        storage = ArrayStorage(share=plan.memory_share, folder=plan.spill_folder)
        # For logits, labels, inputs and losses.
        self._gatherers = [
            ResultGatherer(session.gather, session.gather_objects, is_collated=False),
            ResultGatherer(
                session.gather, session.gather_objects, is_collated=True, num_fields=len(session.label_names or ())
            ),
            ResultGatherer(session.gather, session.gather_objects, is_collated=True),
            ResultGatherer(session.gather, session.gather_objects, is_collated=False),
        ]
        self._collectors = [
            NestedCollector(num_samples, concat=plan.concat_batches, move_every=plan.move_every, storage=storage)
            for _ in self._gatherers
        ]

    def add(self, inputs: Batch, step: Step, *, rows: int, shown: Nested, counts: bool, is_last: bool) -> None:
        """Adds loss, logits and labels for some rows, and inputs to show; nothing for a batch that does not count."""
        session = self.session
        loss, logits, labels = step
        items = self._recorded.items
        repeated = None  # three operations, so only if it is used
        if loss is not None and (session.plan.averages_batches or "loss" in session.plan.include):
            repeated = loss.detach().mean().repeat(session.loss_rows or rows)
        if repeated is not None and session.plan.averages_batches and items is None:
            self._rows.append(session.gather(repeated if counts else repeated[:0]))
        elif loss is not None and counts:
            self._mean.add(loss, session.rule.weight(inputs, session.label_names, rows) if items is None else items)
        if logits is None and labels is None and not session.plan.include:  # nothing but the loss
            return
        losses = repeated if "loss" in session.plan.include else None
        if logits is not None and session.preprocess_logits is not None:
            logits = session.preprocess_logits(logits, labels)
        if self._stream is not None and self._stream.adds_processes_up and not session.keeps_results:
            if counts and logits is not None and labels is not None:
                self._stream.add(logits, labels)
            return
        parts = zip(self._gatherers, (logits, labels, shown, losses), strict=True)
        logits, labels, shown, losses = (one.gather(part, rows if counts else 0) for one, part in parts)
        if logits is not None and labels is not None and (self._stream is not None or self._by_batch):
            self._feed(*map(as_plain_lists, (logits, labels, shown, losses)), is_last=is_last)
        for collector, value in zip(self._collectors, (logits, labels, shown, losses), strict=True):
            if session.keeps_results and value is not None:
                collector.add(value)

    def _feed(self, logits: Nested, labels: Nested, shown: Nested, losses: Nested, *, is_last: bool) -> None:
        """Passes the batch to metrics that take one batch at a time."""
        if self._stream is not None:
            self._stream.add(logits, labels)
        elif self._by_batch and self.session.compute_metrics is not None:
            prediction = current("EvalPrediction", EvalPrediction)(logits, labels, inputs=shown, losses=losses)
            result = self.session.compute_metrics(prediction, compute_result=is_last)
            self._metrics = result if is_last else self._metrics

    def output(
        self, prefix: str, *, num_samples: int, found_labels: bool, places: np.ndarray[Any, Any] | None = None
    ) -> EvalLoopOutput:
        """Returns the results; `num_samples` were seen by all processes, and metrics are named `<prefix>_...`.

        `places` are the indices of the samples in the order in which they were seen, if that is not their own.
        """
        session = self.session
        results = (_in_order(one.result(), places) for one in self._collectors)
        predictions, labels, inputs, losses = map(as_plain_lists, results)
        if self._stream is not None:
            self._metrics = self._stream.result() if found_labels else {}
        elif predictions is not None and labels is not None and session.compute_metrics and not self._by_batch:
            make_prediction = current("EvalPrediction", EvalPrediction)
            self._metrics = session.compute_metrics(make_prediction(predictions, labels, inputs=inputs, losses=losses))
        mean, recorded = self._exchange()
        if self._rows:
            mean = _average_rows(self._rows, skip_non_finite=session.plan.skip_non_finite)
        named = {} if mean is None else {f"{prefix}_loss": mean}
        metrics = _prefixed(self._metrics, prefix, named)
        more = _prefixed(recorded, prefix, {})
        if both := metrics.keys() & more.keys():
            raise DataError(f"{min(both)!r} is recorded, but compute_metrics returns it too. Rename one of the two.")
        return current("EvalLoopOutput", EvalLoopOutput)(predictions, labels, metrics | more, num_samples)

    def _exchange(self) -> tuple[float | None, dict[str, float]]:
        """Returns the mean loss and the recorded numbers of all processes."""
        session = self.session
        recorded = self._recorded
        num_bytes = torch.tensor([[recorded.num_bytes(), 0.0]], dtype=torch.float64)
        *sums, (num_bytes, _) = session.total(torch.cat([self._mean.sums(), num_bytes])).cpu()
        recorded.read_with(torch.zeros(()))
        recorded.agreed_bytes = int(num_bytes)
        if recorded.agreed_bytes:
            recorded.receive(session.collect(recorded.message()))
        return compute_mean(torch.stack(sums), skip_non_finite=session.plan.skip_non_finite), recorded.take()


def _in_order(value: Nested, places: np.ndarray[Any, Any] | None) -> Nested:
    """Returns rows in the order of their indices; `places` are the indices of these rows."""
    if places is None or value is None:
        return value
    inverse = np.argsort(places)

    def put_in_order(leaf: Nested) -> Nested:
        return SampleList(leaf[place] for place in inverse) if isinstance(leaf, SampleList) else leaf[inverse]

    return map_results(put_in_order, value)


def _prefixed(metrics: object, prefix: str, losses: dict[str, float]) -> dict[str, Any]:
    """Returns all metrics under their full names. A metric called `loss` replaces the mean loss."""
    if not isinstance(metrics, dict):
        raise DataError(
            f"compute_metrics returned a {type(metrics).__name__}; it must return a dict of names and numbers, "
            "for example {'accuracy': 0.9}."
        )
    if names := [name for name in metrics if not isinstance(name, str)]:
        raise DataError(
            f"compute_metrics returned a metric named {names[0]!r} (a {type(names[0]).__name__}); names are text, for "
            f"example {f'class_{names[0]}'!r}."
        )
    as_numbers = current("denumpify_detensorize", plain_numbers)
    plain = {name: value for name, value in as_numbers(metrics).items() if name not in losses}
    start = f"{prefix}_"
    return losses | {name if name.startswith(start) else f"{start}{name}": value for name, value in plain.items()}


# -- metrics with a state of their own ------------------------------------------------------------------------------


def is_streaming(metric: object) -> bool:
    """Returns True if a metric has a state of its own, and is no function of an EvalPrediction.

    An object that can be called is such a function, whatever other methods it has, unless it is a module.
    """
    if callable(metric) and not isinstance(metric, torch.nn.Module):
        return False
    feeds = callable(getattr(metric, "update", None)) or callable(getattr(metric, "add_batch", None))
    return feeds and callable(getattr(metric, "compute", None))


class StreamingMetric:
    """Runs one evaluation with an object that has `update` (or `add_batch`) and `compute`.

    So do torchmetrics' and `evaluate`'s; it gets logits, unless `preprocess_logits_for_metrics` changes them.
    """

    def __init__(self, metric: Any, device: torch.device | None = None) -> None:
        self._metric = metric
        self._takes_arrays = not callable(getattr(metric, "update", None))
        self._feed: Callable[..., object] = metric.add_batch if self._takes_arrays else metric.update
        self._names = _read_names(self._feed)
        if callable(getattr(metric, "reset", None)):
            metric.reset()
        if isinstance(metric, torch.nn.Module) and device is not None:
            metric.to(device)

    @property
    def adds_processes_up(self) -> bool:
        """True if `compute` itself combines the processes, so that each adds its own batches."""
        parts = [*self._metric.values()] if isinstance(self._metric, torch.nn.ModuleDict) else [self._metric]
        return bool(parts) and all(callable(getattr(part, "sync", None)) for part in parts)

    def add(self, predictions: Nested, references: Nested) -> None:
        """Adds one batch: predictions and labels, with one row for each sample."""
        if self._takes_arrays:
            predictions = nested_numpify(predictions)
            references = nested_numpify(references)
        if self._names is None:
            self._feed(predictions, references)
        else:
            self._feed(**dict(zip(self._names, (predictions, references), strict=True)))

    def result(self) -> dict[str, Any]:
        """Computes the metric of all batches: a dict, or a number that is named after the metric's class."""
        value = self._metric.compute()
        if isinstance(value, Mapping):
            return dict(value)
        name = type(self._metric).__name__
        if isinstance(python_number(value), (int, float)):
            return {name: value}
        raise DataError(
            f"{name}.compute() returned a {type(value).__name__}; it must return a dict of names and numbers, or "
            "one number."
        )


def _read_names(feed: Callable[..., object]) -> tuple[str, str] | None:
    """Returns the names of a metric's parameters for predictions and references; None to pass them by position."""
    parameters = read_parameters(feed)
    if parameters is None:
        return None
    found = [next((name for name in names if name in parameters), None) for names in (PREDICTIONS, REFERENCES)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])
