"""Losses of single samples in training, for the ledger and for metrics by source, from the step's own logits.

Logits and labels of a micro-batch stay on the device until there are enough of them or a log or a save needs them; then
one operation computes the losses of all. They are read back in one copy, and accumulated on the host.

    values   the losses of a micro-batch, one number for each label that may count; IGNORED if it does not
    segment  consecutive values that belong to one sample: a single value in classification, the values of a text, or of
             each sample in a packed row

`formulas.py` finds out how a model computes its loss. If no formula matches, each sample gets the mean loss of its
micro-batch, and the log says so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from trainwright._types import Batch, DatasetLike, Piece, SampleIds
from trainwright.capabilities.ledger.formulas import (
    IGNORED,
    Formula,
    find_formula,
    find_kept_losses,
    find_tensors,
)
from trainwright.capabilities.ledger.rows import LedgerRows
from trainwright.capabilities.ledger.table import LEDGER_NAME, Array, Ledger, write_table
from trainwright.checkpoint.deferred_io import IMMEDIATE
from trainwright.data.row_names import NamesOf
from trainwright.data.streaming.stream_state import is_shuffled_stream
from trainwright.engine.base import Engine
from trainwright.errors import ModelError
from trainwright.loop.extension import Extension, MicroBatch, Run, SavedRun, Sink
from trainwright.support.loss_kernels import token_losses
from trainwright.support.loss_normalization import LossOutput, stands_in
from trainwright.support.tensor_tree import count_samples

logger = logging.getLogger(__name__)

HELD_LOGITS = 2**20  # logits kept on the device before losses are computed
HELD_BATCHES = 64  # micro-batches kept before losses are computed
HELD_GROUPS = 16  # results of such computations waiting on the device for a log or a save
MEAN_ONLY = (
    "The ledger records for each sample the mean loss of its micro-batch: {reason}. A custom loss can return "
    "LossOutput(loss, sample_losses=...) with one number per sample."
)

# A micro-batch on the host: its optimizer step, 0 if it does not count; the samples of its rows; the number of values
# per row, 0 for one per sample. A plain tuple, since each step makes one.
Noted = tuple[int, SampleIds, int]


class WindowSamples:
    """The samples of each micro-batch of a window, in turn.

    Attributes:
        window: the window.
        num_parts: parts of each micro-batch.
        place: the next micro-batch, or the next row of the window with several parts.
        sample_ids: ids for each micro-batch of the window.
    """

    __slots__ = ("num_parts", "place", "sample_ids", "window")

    def __init__(self, window: Any = None, *, num_parts: int = 1, sample_ids: Sequence[SampleIds] = ()) -> None:
        self.window = window  # a loop.fit.Window
        self.num_parts = num_parts
        self.place = 0
        self.sample_ids = sample_ids

    def take_rows(self, inputs: Batch) -> SampleIds:
        """Returns the samples in each row of the next micro-batch, or of a part of one; empty if unknown."""
        place = self.place
        if self.num_parts > 1:
            rows: SampleIds = [row for ids in self.sample_ids for row in ids]
            self.place += count_samples(inputs) or 1
            return rows[place : self.place]
        self.place += 1
        rows = self.sample_ids[place]
        if rows and isinstance(inputs, Mapping) and "cu_seq_lens_q" in inputs:  # all rows are joined into one
            return [[piece for row in rows for piece in row]]  # type: ignore[union-attr]
        return rows


class HeldBatches:
    """Micro-batches on the device, until their losses are computed, and these losses until they are read.

    Attributes:
        measured: micro-batches with their losses.
    """

    __slots__ = ("_labels", "_logits", "_num_logits", "_pending", "measured")

    def __init__(self) -> None:
        self.measured: list[tuple[list[Noted], torch.Tensor]] = []
        self._pending: list[Noted] = []
        self._logits: list[torch.Tensor] = []  # for `_pending`, with their labels
        self._labels: list[torch.Tensor] = []
        self._num_logits = 0

    def add(self, batch: Noted, logits: torch.Tensor, labels: torch.Tensor, num_logits: int) -> bool:
        """Adds a micro-batch; returns True once there are so many that their losses should be computed."""
        self._pending.append(batch)
        self._logits.append(logits)
        self._labels.append(labels)
        self._num_logits += num_logits
        return self._num_logits > HELD_LOGITS or len(self._pending) == HELD_BATCHES

    def measure(self, formula: Formula | None, *, is_flat: bool) -> None:
        """Computes the losses by a formula, on the device; `is_flat`: logits and labels have one value for each row."""
        if not self._pending:
            return
        assert formula is not None
        logits = self._logits
        labels = self._labels
        with torch.no_grad():
            if not is_flat:
                flat = [formula.flat(*pair) for pair in zip(logits, labels, strict=True)]
                logits = [one for one, _ in flat]
                labels = [one for _, one in flat]
            self.measured.append((self._pending, formula.losses(torch.cat(logits), torch.cat(labels))))
        self._pending = []
        self._logits = []
        self._labels = []
        self._num_logits = 0

    def drop_step(self, step: int) -> None:
        """Makes the losses of a step count no more."""
        for batches in (self._pending, *(batches for batches, _ in self.measured)):
            batches[:] = [(0 if one == step else one, rows, width) for one, rows, width in batches]

    def take_measured(self) -> list[tuple[list[Noted], torch.Tensor]]:
        """Returns the micro-batches with losses, and forgets them."""
        taken = self.measured
        self.measured = []
        return taken


class SampleLosses(Extension):
    """Losses of a run's samples, between two readings on the device.

    Args:
        run: the run, which provides the step and the samples of its window.
        settle_guard: makes the guard report steps without an update.
        engine: engine of the run, for communication between processes.
        smoothing: label smoothing.
        dataset: the training data; a mixture provides the source of each sample.
        names: names of its samples.
        keeps_ledger: whether to record visits and losses of each sample, besides the sources' losses.
        writes: whether this process writes files.
        folder: directory of the run, where its ledger is written at the end.
    """

    name = "ledger"
    order = 10  # after the guard
    needs_outputs = True

    def __init__(
        self,
        run: Any,
        engine: Engine,
        *,
        settle_guard: Callable[[], None],
        dataset: DatasetLike,
        names: NamesOf,
        smoothing: float,
        keeps_ledger: bool,
        writes: bool,
        folder: str,
    ) -> None:
        self._run = run
        self._folder = Path(folder)
        self._settle_guard = settle_guard
        self._engine = engine
        self._smoothing = smoothing
        self._dataset = dataset
        has_sources = getattr(getattr(dataset, "curriculum", None), "has_sources", True)
        self._locate = getattr(dataset, "find_source", None) if has_sources else None
        self._said: set[str] = set()
        self.rows = LedgerRows(names)
        if keeps_ledger and isinstance(dataset, IterableDataset) and self._locate and is_shuffled_stream(dataset):
            self._say("there is no ledger: a stream of the mixture is shuffled, so its samples have no position")
            keeps_ledger = False
        self.ledger = Ledger() if keeps_ledger else None  # all processes, since the last `joined`
        self._own = Ledger() if keeps_ledger and engine.num_replicas > 1 else self.ledger  # this process, since then
        self._formula: Formula | None = None
        self._is_tried = False
        self._writes = writes
        self._is_plain = False  # a sample has one label, as in most classifications: the fastest path
        self._num_classes = 1
        self._held = HeldBatches()
        self._window = WindowSamples()

    # -- in a step -----------------------------------------------------------------------------------------------------

    def micro_batch(self, batch: MicroBatch) -> None:
        """Records a micro-batch."""
        seen = None if batch.model_inputs is None else (batch.outputs, batch.model_inputs)
        self._add(batch.loss, batch.inputs, batch.num_items, seen)

    def _add(
        self,
        loss: torch.Tensor | LossOutput,
        inputs: Batch,
        num_items: torch.Tensor | int | None,
        seen: tuple[Any, Batch] | None,
    ) -> None:
        progress = self._run.progress
        window = self._window
        if progress.window.current is not window.window or progress.window.num_parts != window.num_parts:
            window = self._begin_window(progress)
        step = progress.state.global_step + 1
        if self._is_plain and seen is not None and type(inputs) is dict:
            outputs, batch = seen
            rows = window.sample_ids[window.place]
            logits = outputs["logits"]
            num = logits.numel()
            if len(rows) * self._num_classes == num:
                window.place += 1
                self._hold((step, rows, 1), logits.detach(), batch["labels"], num)
                return
        rows = window.take_rows(inputs)
        if not rows and window.num_parts == 1:
            self._say("samples of this stream, or of your own dataloader, are not in the ledger: they have no index")
        if not rows or stands_in(inputs):
            return
        if isinstance(loss, LossOutput):
            if loss.sample_losses is not None:
                rows = singly(rows)
                self._held.measured.append(([(step, rows, 0)], _checked(loss.sample_losses, len(rows))))
                return
            loss = loss.loss
        tensors = None
        if seen is not None:
            model = self._engine.unwrap(self._run.setup.model)
            tensors = find_tensors(*seen, inputs, given=token_losses(model))
        if not self._is_tried:
            self._find_formula(tensors, loss, inputs, num_items)
        formula = self._formula
        if formula is None or tensors is None:
            rows = singly(rows)
            mean = self._run.losses.rule.compute_mean(loss.detach(), inputs, num_items).reshape(1)
            self._held.measured.append(([(step, rows, 0)], mean.expand(len(rows))))
            return
        logits, labels = tensors
        if len(rows) != len(labels):
            self._say(f"a batch has {len(labels)} rows for {len(rows)} samples, so they are not in the ledger")
            return
        if formula.kind == "kept":
            kept = find_kept_losses(loss, formula.depth)
            if kept is None:  # this loss was computed differently
                self._measure()
                formula = self._formula = formula._replace(kind="ce")
            else:
                num = kept[1].numel()
                self._hold((step, rows, num // len(rows)), *kept, num)
                return
        is_known = seen is not None and "labels" in seen[1] and isinstance(seen[0], Mapping)
        self._is_plain = self._is_plain or (
            is_known and formula.kind == "ce" and labels.ndim == 1 and type(rows[0]) is int and window.num_parts == 1
        )
        width = 1 if formula.kind in ("mse", "bce") else labels.numel() // len(labels) - formula.shifts
        self._num_classes = logits.shape[-1]
        self._hold((step, rows, width), logits.detach(), labels, logits.numel())

    def _hold(self, batch: Noted, logits: torch.Tensor, labels: torch.Tensor, num_logits: int) -> None:
        """Keeps a micro-batch until losses are computed, which happens once there are many."""
        if self._held.add(batch, logits, labels, num_logits):
            self._measure()

    def _begin_window(self, progress: Any) -> WindowSamples:
        current = progress.window.current
        sample_ids = current.sample_ids
        if not sample_ids:
            self._say("the trainer did not read the batches of the step, so their samples are unknown")
            sample_ids = [[]] * len(current.batches)
        num_parts = progress.window.num_parts
        self._window = WindowSamples(current, num_parts=num_parts, sample_ids=sample_ids)
        self._is_plain = self._is_plain and num_parts == 1
        return self._window

    def _find_formula(
        self, tensors: tuple[torch.Tensor, torch.Tensor] | None, loss: torch.Tensor, inputs: Batch, num_items: Any
    ) -> None:
        """Finds the formula of the model's loss from the first micro-batch; reads its loss back, once per run."""
        self._is_tried = True
        reason = "the logits and labels of its loss are not available"
        if tensors is not None:
            rule = self._run.losses.rule
            mean = float(rule.compute_mean(loss.detach(), inputs, num_items))
            shifts = rule.shifts_labels and "shift_labels" not in inputs
            self._formula = find_formula(*tensors, loss, mean=mean, shifts=shifts, smoothing=self._smoothing)
            if self._formula is not None:
                return
            reason = f"the loss of the first micro-batch, {mean:.4g}, is not the mean of a known loss of its logits"
        self._say(MEAN_ONLY.format(reason=reason))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s.", text[:1].upper() + text[1:].rstrip("."))

    def mark(self) -> None:
        """Returns nothing: records of a window carry its step."""

    def rewind(self, mark: None) -> None:
        """Removes the losses of the current step."""
        self.refused(self._run.progress.state.global_step + 1)

    def refused(self, step: int) -> None:
        """Removes the losses of a step that had no update, or that is repeated."""
        self._held.drop_step(step)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Computes the pending losses, on the device."""
        self._held.measure(self._formula, is_flat=self._is_plain)

    def settle(self) -> None:
        """Reads the losses back before a log or a save: for metrics by source, or if there are many."""
        if self._locate is not None or len(self._held.measured) >= HELD_GROUPS:
            self._read()

    def _read(self) -> None:
        """Reads the losses back; adds them to the ledger, and to the next log's numbers for each source."""
        self._settle_guard()  # steps that it refused do not count
        self._measure()
        measured = self._held.take_measured()
        if not measured:
            return
        read = torch.cat([values.float() for _, values in measured]).cpu().double().numpy()
        ends = itertools.accumulate(len(values) for _, values in measured)
        for (batches, _), values in zip(measured, np.split(read, list(ends)), strict=False):
            self._add_up(batches, values)

    def _add_up(self, batches: Sequence[Noted], values: Array) -> None:
        """Adds up the values of micro-batches by sample."""
        sample, size, visits, step = self._segments(batches)
        counts = np.ones(len(values), bool) if batches[0][2] == 0 else values != IGNORED
        if size is None:  # each sample has one value
            tokens = counts.astype(np.int64)
            loss_sum = np.where(counts, values, 0.0)
        else:
            chosen = size > 0  # `reduceat` gives an empty segment the first value of the next one
            starts = (np.cumsum(size) - size)[chosen]
            tokens = np.zeros(len(size), np.int64)
            loss_sum = np.zeros(len(size))
            tokens[chosen] = np.add.reduceat(counts, starts, dtype=np.int64)
            loss_sum[chosen] = np.add.reduceat(np.where(counts, values, 0.0), starts)
        if (sample < 0).any():
            known = sample >= 0
            sample, visits, step, tokens, loss_sum = (x[known] for x in (sample, visits, step, tokens, loss_sum))
        if self._own is not None:
            self._own.add(sample, step=step, visits=visits, tokens=tokens, loss_sum=loss_sum)
        if self._locate is not None:
            self._record_sources(sample, visits, tokens, loss_sum)

    def _segments(self, batches: Sequence[Noted]) -> tuple[Array, Array | None, Array, Array]:
        """Returns sample, number of values (None for 1 each), visits and step of each segment.

        Sample -1 if none counts.
        """
        steps = [step for step, _, _ in batches]
        if all(step and width < 2 and type(rows[0]) is int for step, rows, width in batches):
            sample = np.asarray([row for _, rows, _ in batches for row in rows])
            return sample, None, np.ones_like(sample), np.repeat(steps, [len(rows) for _, rows, _ in batches])
        shifts = self._formula is not None and self._formula.shifts
        found: list[tuple[int, int, int]] = []
        numbers = []
        for step, rows, width in batches:
            before = len(found)
            if step == 0:
                found.append((-1, len(rows) * (width or 1), 0))
            elif isinstance(rows[0], int):
                found += [(sample, width or 1, 1) for sample in rows]  # type: ignore[misc]
            else:
                found += segments(rows, width, shifts=shifts)  # type: ignore[arg-type]
            numbers.append(len(found) - before)
        samples, sizes, visits = np.asarray(found).T
        return samples, sizes, visits, np.repeat(steps, numbers)

    def _record_sources(self, sample: Array, visits: Array, tokens: Array, loss_sum: Array) -> None:
        """Records loss, tokens and samples of each source for the next log."""
        record = self._run.progress.recorded.add
        names = self._dataset.names
        owners = self._dataset.find_sources(sample)
        has_any = np.bincount(owners, minlength=len(names)).tolist()
        sums = (np.bincount(owners, column, len(names)).tolist() for column in (loss_sum, tokens, visits))
        for name, _, loss, num, samples in filter(itemgetter(1), zip(names, has_any, *sums, strict=True)):
            if num:
                record(f"loss/{name}", loss / num, num)
            record(f"tokens/{name}", num, reduce="sum")
            record(f"samples/{name}", samples, reduce="sum")

    # -- files ---------------------------------------------------------------------------------------------------------

    def load(self, checkpoint: SavedRun) -> None:
        """Continues the ledger of a checkpoint, or begins an empty one."""
        if self.ledger is None:
            return
        path = checkpoint.entry(self.name).path
        if path is not None:
            self.ledger.merge(self.rows.read(path))
        elif checkpoint.entry("curriculum").path is None:
            logger.warning("%s has no %s: the ledger begins with this run.", checkpoint.path, LEDGER_NAME)

    def joined(self) -> Ledger | None:
        """Returns the ledger of all processes, which must call it together; None if only sources are tracked."""
        self._read()
        if self.ledger is not None and self._own is not None and self._own is not self.ledger:
            for part in self._engine.gather_replica_objects(self._own.taken()):
                self.ledger.merge(part)
        return self.ledger

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the ledger of all processes into a checkpoint."""
        self._write(folder, sink)

    def finish(self, run: Run) -> None:
        """Writes the ledger of the run into its directory."""
        self._write(self._folder, IMMEDIATE, is_end=True)

    def close(self) -> None:
        """Releases the run."""
        self._run = None

    def _write(self, folder: Path, sink: Sink, *, is_end: bool = False) -> None:
        ledger = self.joined()
        if ledger is None or not self._writes:
            return
        if not ledger.last_step.any():
            self._say("the ledger is empty: no micro-batch was trained by training_step of the trainer")
        about = {
            "step": self._run.progress.state.global_step,
            "is_mean": self._is_tried and self._formula is None,
            **self.rows.about(),
        }
        noted = ledger.noted()
        self.rows.read_contents(noted, is_end=is_end)
        sink.put((), lambda nothing: write_table(self.rows.table(noted, about), folder / LEDGER_NAME))


def singly(rows: SampleIds) -> SampleIds:
    """Returns the same samples, each in its own row."""
    return rows if not rows or isinstance(rows[0], int) else [[piece] for row in rows for piece in row]  # type: ignore[union-attr]


def segments(rows: Sequence[list[Piece]], width: int, *, shifts: bool) -> Iterator[tuple[int, int, int]]:
    """Yields sample, number of values and visits for each piece of packed rows; the rest of a row has sample -1.

    With `shifts`, the first label of a row has no value. A `width` of 0 means one value for each piece.
    """
    for row in rows:
        left = width
        is_first = shifts
        for sample, start, stop in row:
            length = stop - start - is_first if width else 1
            yield sample, length, int(start == 0)
            left = left - length
            is_first = False
        if left > 0:
            yield -1, left, 0


def _checked(losses: torch.Tensor, num_rows: int) -> torch.Tensor:
    if losses.numel() != num_rows:
        raise ModelError(
            f"sample_losses of a LossOutput has {losses.numel()} numbers for {num_rows} samples; return one number per "
            "sample."
        )
    return losses.detach().reshape(-1).clone()
