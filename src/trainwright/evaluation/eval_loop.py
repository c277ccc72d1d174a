"""The evaluation loop: batches through `prediction_step`, one after the other, into a `PredictionAccumulator`.

With several processes, a batch that only stands in (`TailBatch` without samples) keeps a process in step with the
others; what it makes of it does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from trainwright._types import Batch, Nested, TailBatch, has_length
from trainwright.evaluation.outputs import EvalLoopOutput
from trainwright.evaluation.prediction_accumulator import EvalContext, PredictionAccumulator
from trainwright.hooks import EvalHooks
from trainwright.state.run_state import RunState
from trainwright.tensor_tree import find_batch_size

logger = logging.getLogger(__name__)


def evaluation_loop(
    session: EvalContext, run: RunState, hooks: EvalHooks, dataloader: Iterable[Batch], *, prefix: str
) -> EvalLoopOutput:
    """Runs the model over a dataloader; metrics are named `<prefix>_...`, and arrays are None unless kept."""
    known = _num_samples(dataloader, hooks)
    results = PredictionAccumulator(session, known)
    run.interrupts.open()  # nothing is half done while evaluating: a signal may end it at once
    try:
        num_seen, found_labels = _collect(session, run, hooks, dataloader, results)
    finally:
        run.interrupts.close()
    if known is None:
        num_seen = int(session.total(torch.tensor(num_seen)))
    if num_seen == 0 and known in (None, 0):
        logger.warning("The evaluation set is empty: its dataloader gave no batch, so there is no loss and no metric.")
    return results.output(prefix, num_samples=num_seen if known is None else known, found_labels=found_labels)


def _collect(
    session: EvalContext, run: RunState, hooks: EvalHooks, dataloader: Iterable[Batch], results: PredictionAccumulator
) -> tuple[int, bool]:
    """Runs all batches; returns the number of samples of this process, and whether there were labels."""
    num_seen, found_labels = 0, False
    lacking: Batch | None = None
    batches = _with_last(dataloader) if session.plan.streams_metrics else ((batch, False) for batch in dataloader)
    for inputs, is_last in batches:
        counts = not isinstance(inputs, TailBatch) or inputs.num_samples > 0
        rows = find_batch_size(inputs) or 0
        num_seen += rows if counts else 0
        step = hooks.prediction_step(session.model, inputs, session.loss_only, ignore_keys=session.ignore_keys)
        found_labels = found_labels or step[2] is not None
        if session.needs_labels and session.compute_metrics is not None and step[2] is None and not session.loss_only:
            lacking = lacking or inputs
        shown = _shown(session, hooks, inputs)
        results.add(inputs, step, rows=rows or 1, shown=shown, counts=counts, is_last=is_last)
        del step  # or this batch's output would lie beside the next one's
        session.events.fire("on_prediction_step", run)
        run.interrupts.passes()
    if lacking is not None:
        warn_no_labels(session.label_names, lacking)
    return num_seen, found_labels


def _shown(session: EvalContext, hooks: EvalHooks, inputs: Batch) -> Nested:
    """Returns the inputs for metrics: the whole batch where they take batches, else the main input."""
    if "inputs" not in session.plan.include:
        return None
    return hooks._prepare_input(inputs if session.plan.streams_metrics else inputs[session.main_input])


def warn_no_labels(label_names: Sequence[str], inputs: Batch) -> None:
    """Says that an evaluation has no metrics because its batches have no labels."""
    logger.warning(
        "compute_metrics is not called, because the evaluation batches have no labels: looked for %s; found %s. Rename "
        "the column, or name it with label_names=[...].",
        ", ".join(label_names) or "labels, of which this model takes none", ", ".join(inputs),
    )  # fmt: skip


def _num_samples(dataloader: object, hooks: EvalHooks) -> int | None:
    dataset = getattr(dataloader, "dataset", None)
    if has_length(dataset):
        return len(dataset)
    return hooks.num_examples(dataloader) if has_length(dataloader) else None


def _with_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yields each batch, and whether it is the last one."""
    iterator = iter(batches)
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield current, following is None
        current = following
