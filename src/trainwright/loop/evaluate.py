"""The evaluation loop: batches through `prediction_step`, results collected, metrics computed.

The loss is the mean over items, not over batches: each batch's mean loss counts with the number of items it was taken
over (label tokens where labels are per token, samples otherwise). So it does not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainwright.config.plans import EvalPlan
from trainwright.errors import DataError
from trainwright.hooks import EvalHooks, Events, Gather
from trainwright.loop.loss_scale import LossRule
from trainwright.metrics.collect import Collector
from trainwright.metrics.nested import find_batch_size, nested_truncate
from trainwright.metrics.report import plain_numbers
from trainwright.metrics.types import EvalLoopOutput, EvalPrediction
from trainwright.state.run import RunState
from trainwright.types import Batch, TailBatch, has_length


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSession:
    """The parts of one evaluation.

    Attributes:
        model: as the engine prepared it, in evaluation mode.
        gather: joins a nested value of all processes; `collect` stacks tensors of one shape.
        label_names: entries of a batch that are labels.
        main_input: entry of a batch that metrics get as `inputs`.
        compute_metrics: from an EvalPrediction to a dict; None: loss only.
        preprocess_logits: applied to (logits, labels) of each batch before they are kept.
        needs_labels: metrics without labels are an error (an evaluation), not a matter of course (a prediction).
    """

    plan: EvalPlan
    model: Any
    rule: LossRule
    events: Events
    gather: Gather
    collect: Callable[[torch.Tensor], torch.Tensor] = _alone
    label_names: Sequence[str]
    main_input: str = "input_ids"
    compute_metrics: Callable[..., dict[str, Any]] | None = None
    preprocess_logits: Callable[[Any, Any], Any] | None = None
    loss_only: bool = False
    needs_labels: bool = False
    keeps_results: bool = True
    ignore_keys: list[str] | None = None


@dataclass(slots=True)
class Losses:
    """Mean losses of batches, with the number of items each was taken over; read back once, at the end."""

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, loss: torch.Tensor, weight: torch.Tensor | int, batch_size: int) -> None:
        self.values.append(loss.detach().float().mean())
        self.weights.append(weight)
        self.sizes.append(batch_size)

    def mean(self, collect: Callable[[torch.Tensor], torch.Tensor], *, skip_non_finite: bool) -> float | None:
        """Mean over the items of all processes; without batches that have none, and non-finite ones if told so."""
        if not self.values:
            return None
        mine = torch.stack(
            (torch.stack(self.values).cpu().double(), torch.tensor([int(w) for w in self.weights], dtype=torch.float64))
        )
        values, weights = collect(mine).cpu().transpose(0, 1).flatten(1)
        counts = weights > 0
        if skip_non_finite and bool((torch.isfinite(values) & counts).any()):
            counts &= torch.isfinite(values)
        if not bool(counts.any()):
            return float(values.mean())
        return float((values[counts] * weights[counts]).sum() / weights[counts].sum())

    def per_sample(self) -> Any:
        values = torch.stack(self.values).cpu().numpy() if self.values else np.array([], dtype=np.float32)
        return np.repeat(values, self.sizes)


def evaluation_loop(
    session: EvalSession, run: RunState, hooks: EvalHooks, dataloader: Iterable[Batch], *, prefix: str
) -> EvalLoopOutput:
    """Runs the model over a dataloader.

    Returns:
        Predictions and labels (None unless kept), metrics named `<prefix>_...`, and the number of samples.
    """
    known = _num_samples(dataloader, hooks)
    results = _Results(session, known)
    run.interrupts.open()  # nothing is half done while evaluating: a signal may end it at once
    try:
        num_seen = _collect(session, run, hooks, dataloader, results)
    finally:
        run.interrupts.close()
    if num_seen == 0 and known in (None, 0):
        raise DataError("The evaluation set is empty: its dataloader gave no batch. Give it at least one sample.")
    return results.output(prefix, num_samples=num_seen if known is None else known)


def _collect(
    session: EvalSession, run: RunState, hooks: EvalHooks, dataloader: Iterable[Batch], results: _Results
) -> int:
    """Runs all batches; returns how many samples there were."""
    num_seen = 0
    for inputs, is_last in _with_last(dataloader):
        stands_in = isinstance(inputs, TailBatch) and inputs.num_samples == 0
        batch_size = 0 if stands_in else find_batch_size(inputs) or 0
        num_seen += batch_size
        loss, logits, labels = hooks.prediction_step(
            session.model, inputs, session.loss_only, ignore_keys=session.ignore_keys
        )
        if session.needs_labels and session.compute_metrics is not None and labels is None and not session.loss_only:
            _raise_no_labels(session.label_names, inputs)
        if loss is not None:
            results.losses.add(loss, session.rule.weight(inputs, session.label_names, batch_size), batch_size)
        shown = hooks._prepare_input(inputs[session.main_input]) if "inputs" in session.plan.include else None
        if stands_in:  # another process has its samples
            logits, labels, shown = nested_truncate((logits, labels, shown), 0)
        results.add(logits, labels, shown, is_last=is_last)
        session.events.fire("on_prediction_step", run)
    return num_seen


class _Results:
    """What an evaluation collects, and the metrics made of it."""

    def __init__(self, session: EvalSession, num_samples: int | None) -> None:
        plan = session.plan
        self.session = session
        self.losses = Losses()
        self.metrics: dict[str, Any] = {}
        self.logits, self.labels, self.inputs = (
            Collector(num_samples, concat=plan.concat_batches, move_every=plan.move_every) for _ in range(3)
        )

    def add(self, logits: Any, labels: Any, inputs: Any, *, is_last: bool) -> None:
        session = self.session
        if logits is not None and session.preprocess_logits is not None:
            logits = session.preprocess_logits(logits, labels)
        logits, labels, inputs = session.gather(logits), session.gather(labels), session.gather(inputs)
        if session.plan.streams_metrics and session.compute_metrics is not None and logits is not None:
            extras = self._extras(inputs, self.losses.values[-1] if self.losses.values else None)
            prediction = EvalPrediction(logits, labels, **extras)
            result = session.compute_metrics(prediction, compute_result=is_last)
            self.metrics = result if is_last else self.metrics
        if session.keeps_results:
            for collector, value in ((self.logits, logits), (self.labels, labels), (self.inputs, inputs)):
                if value is not None:
                    collector.add(value)

    def output(self, prefix: str, *, num_samples: int) -> EvalLoopOutput:
        session = self.session
        predictions, labels, inputs = self.logits.result(), self.labels.result(), self.inputs.result()
        has_both = predictions is not None and labels is not None
        if session.compute_metrics is not None and has_both and not session.plan.streams_metrics:
            extras = self._extras(inputs, self.losses.per_sample())
            self.metrics = session.compute_metrics(EvalPrediction(predictions, labels, **extras))
        mean = self.losses.mean(session.collect, skip_non_finite=session.plan.skip_non_finite)
        metrics: dict[str, Any] = {} if mean is None else {f"{prefix}_loss": mean}
        for name, value in plain_numbers(_checked(self.metrics)).items():
            metrics[name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"] = value
        return EvalLoopOutput(predictions, labels, metrics, num_samples)

    def _extras(self, inputs: Any, losses: Any) -> dict[str, Any]:
        include = self.session.plan.include
        return {"inputs": inputs if "inputs" in include else None, "losses": losses if "loss" in include else None}


def _checked(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, dict):
        raise DataError(
            f"compute_metrics returned a {type(metrics).__name__}; it must return a dict of names and numbers, "
            "for example {'accuracy': 0.9}."
        )
    return metrics


def _raise_no_labels(label_names: Sequence[str], inputs: Batch) -> None:
    raise DataError(
        f"compute_metrics was given, but the evaluation batches have no labels: looked for {', '.join(label_names)}, "
        f"found {', '.join(inputs)}. Rename the column, name it with label_names=[...], or take compute_metrics away."
    )


def _num_samples(dataloader: Any, hooks: EvalHooks) -> int | None:
    dataset = getattr(dataloader, "dataset", None)
    if has_length(dataset):
        return len(dataset)
    return hooks.num_examples(dataloader) if has_length(dataloader) else None


def _with_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last one."""
    iterator = iter(batches)
    end: Any = object()
    current = next(iterator, end)
    while current is not end:
        following = next(iterator, end)
        yield current, following is end
        current = following
