"""Incident bundles of a run: gathers what belongs to a bad step, writes it, and keeps the newest. Training continues.

Nothing is kept for it during a healthy step. When an incident is known, its batches are still in the loop, the weights
are those of before the step, and the random states of before it are computed from those after it
(`guard/random_rewind.py`), for which the forward passes are run once more. The same pass finds the first module with a
value that is not finite; parts of the batch then find the samples. A failure of all this is logged, and nothing else.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import pickle
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from trainwright._types import Batch, JSONObject, is_instance_of, without_tokens
from trainwright.checkpoint import async_writer, rng
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.checkpoint.store import CheckpointStore, flush, link_unchanged
from trainwright.config.fields import value_of
from trainwright.config.plans import StepPlan
from trainwright.data.loader import Loader
from trainwright.data.prepared_dataloader import map_tensors
from trainwright.engine.base import Engine
from trainwright.errors import BadStepError, BundleError
from trainwright.guard import bundle
from trainwright.guard.incidents import Incident
from trainwright.guard.probe import Findings, entries_not_finite, find_bad_rows, probe, rows_of, weights_not_finite
from trainwright.guard.random_rewind import States, rewound, same
from trainwright.journal import record
from trainwright.loop.context import LoopContext
from trainwright.loop.micro_batch_retry import MicroBatchPart, parts_of
from trainwright.loop.step import Window
from trainwright.loss_normalization import LossRule
from trainwright.state.run_state import RunState
from trainwright.tensor_tree import find_batch_size, tensors_of

logger = logging.getLogger(__name__)

MOST_LOOKED_AT = 20  # bad steps of a run; a run in which every step is bad must not take twice as long
HANG_TIMEOUT_S = 20.0  # for the bundle of a hang
REQUEST, ERROR, OUT_OF_MEMORY, HANG = "request", "error", "oom", "hang"


class RunFacts(Protocol):
    """Attributes that are read of a `TrainingRun`."""

    progress: RunState
    run_id: str
    loss_rule: LossRule | None
    loader: Loader | None
    plan: StepPlan | None
    context: LoopContext | None


class LossHooks(Protocol):
    """Methods of the trainer that make the loss of a micro-batch."""

    args: Any
    model: Any

    def _prepare_inputs(self, inputs: Batch) -> Batch: ...
    def compute_loss_context_manager(self) -> Any: ...
    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Facts about a step.

    Attributes:
        states: random states of before its forward passes, as far as `is_exact`.
        is_exact: a second run from `states` gave the same losses (or error) and ended in the same states.
        found: by that second run; None: there was none.
        rows: samples that are bad by themselves: micro-batch, row.
        samples: the same, as the dataset numbers them.
        all_samples: of each micro-batch.
        trained: losses of the step, where there was no second run.
        weights: gathered from all processes, where each has a part of them.
    """

    states: States | None = None
    is_exact: bool = False
    found: Findings | None = None
    rows: list[tuple[int, int]] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    all_samples: list[list[Any]] = field(default_factory=list)
    trained: list[torch.Tensor] = field(default_factory=list)
    weights: Mapping[str, torch.Tensor] | None = None


def window_losses(hooks: LossHooks, run: RunFacts, model: Any, window: Window) -> Iterator[torch.Tensor]:
    """Runs the forward passes of a window as the step does, and yields the losses that are differentiated.

    Args:
        hooks: the trainer.
        run: with the arithmetic of the loss.
        model: the bare module.
        window: its micro-batches.
    """
    progress, rule = run.progress, run.loss_rule
    assert rule is not None
    before = progress.part_of_micro_batch, progress.share_of_window
    try:
        for part in parts_of(window.batches, progress.num_parts, needs_shares=rule.aux_coefficient != 0.0):
            progress.part_of_micro_batch, progress.share_of_window = part.of_micro_batch, part.of_window
            yield _loss(hooks, run, model, window, part)
    finally:
        progress.part_of_micro_batch, progress.share_of_window = before


def _loss(hooks: LossHooks, run: RunFacts, model: Any, window: Window, part: MicroBatchPart) -> torch.Tensor:
    assert run.loss_rule is not None
    with run.progress.recording_apart(run.progress.meter.total.device), hooks.compute_loss_context_manager():
        inputs = hooks._prepare_inputs(part.inputs)
        loss = hooks.compute_loss(model, inputs, num_items_in_batch=window.num_items)
    num = len(window.batches)
    return run.loss_rule.apply(loss, part.inputs, window.num_items, micro_batches=num, share=part.of_micro_batch)


def bad_rows(
    hooks: LossHooks, run: RunFacts, model: Any, window: Window, *, error: str = ""
) -> list[tuple[int, int]] | None:
    """Searches the samples of a window that are bad by themselves, by halving its micro-batches.

    Args:
        hooks: the trainer.
        run: with the arithmetic of the loss.
        model: the bare module.
        window: its micro-batches.
        error: type and message of an error that a bad sample raises; empty: its loss or gradient is not finite.

    Returns:
        Micro-batch and row of each; empty: none is bad without the others; None: most of them are, or the
        weights are not finite.
    """
    if weights_not_finite(model):
        return None
    rows: list[tuple[int, int]] = []
    for number, batch in enumerate(window.batches):
        size = find_batch_size(batch) or 1

        def is_bad(some: Sequence[int], batch: Batch = batch, size: int = size) -> bool:
            part = MicroBatchPart(rows_of(batch, some, size), of_micro_batch=len(some) / size)
            found = probe(model, lambda: iter([_loss(hooks, run, model, window, part)]))
            kind = error.partition(":")[0]
            return found.error.partition(":")[0] == kind if error else not found.error and not found.is_finite

        if not is_bad(range(size)):
            continue
        some = find_bad_rows(size, is_bad)
        if some is None or (len(some) == size and size > 2):
            return None
        rows += [(number, row) for row in some]
    return rows


class IncidentRecorder:
    """Writes the bundles of one run.

    Args:
        hooks: the trainer.
        run: whose incidents they are.
        engine: of the run.
        folder: output directory of the run.
    """

    def __init__(self, hooks: LossHooks, run: RunFacts, engine: Engine, folder: str) -> None:
        self._hooks = hooks
        self._run = run
        self._engine = engine
        self._folder = Path(folder)
        self._root = self._folder / bundle.FOLDER
        self._is_on = value_of(hooks.args, "incidents")
        self._num_looked_at = 0
        self._written: dict[str, Path] = {}  # cause -> bundle, which may be deleted by now

    # -- four causes ---------------------------------------------------------------------------------------------------

    def record(self, incident: Incident, window: object) -> Incident:
        """Looks at a bad step and writes its bundle. All processes call it for the same step.

        Args:
            incident: as the guard knows it.
            window: the micro-batches of this process.

        Returns:
            The incident, with the samples and the path of the bundle.
        """
        if not self._is_on or not isinstance(window, Window) or self._num_looked_at >= MOST_LOOKED_AT:
            return incident
        self._num_looked_at += 1
        engine, rank = self._engine, int(self._hooks.args.process_index)
        names = ("kind", "step", "action", "what", "values", "threshold")
        details = {name: getattr(incident, name) for name in names}
        seen = Evidence()
        try:
            seen = self._look_at(window)
        except Exception as error:
            self._tell("It could not be looked at", incident.step, error)
        if engine.holds_parts and not engine.updates_in_clip:
            writer = 0
            window, seen, details["ranks"] = self._gathered(window, seen, details)
        else:
            is_bad = seen.found is not None and not seen.found.is_finite
            bad_ranks = [other for other, bad in enumerate(engine.gather_objects(is_bad)) if bad]
            writer = (bad_ranks or [0])[0]
            details["ranks"] = {"bad": bad_ranks, "of_batch": writer}
        written = incident
        if rank == writer:
            path, note = self._write(window, seen, details)
            written = replace(incident, samples=tuple(seen.samples), note=note, path=path)
        return engine.gather_objects(written)[writer]

    def failed(self, error: BaseException) -> None:
        """Writes the bundle of an error that was raised inside of a step; other errors have none.

        Args:
            error: with its traceback.
        """
        window = self._run.progress.window
        is_found = not isinstance(error, Exception) or isinstance(error, BadStepError)  # signals; or by a guard
        if not self._is_on or is_found or window is None or self._run.progress.is_window_trained:
            return
        is_full = self._engine.is_out_of_memory(error)
        text = f"{type(error).__name__}: {without_tokens(str(error))}"
        seen = Evidence()
        try:
            seen = Evidence(states=rng.capture()) if is_full else self._look_at(window, error=text)
        except Exception as second:
            self._tell("It could not be looked at", self._step, second)
        kind = OUT_OF_MEMORY if is_full else ERROR
        has_begun = self._run.progress.is_updating
        details = {"kind": kind, "step": self._step, "what": text, "error": text, "update_had_begun": has_begun}
        path, note = self._write(window, seen, details)
        if path:
            logger.warning("Step %d: %s. %s", self._step, text.rstrip("."), note)

    def request(self, reason: str) -> Path:
        """Writes the bundle of the current step, or of the last one with the weights of now.

        Args:
            reason: for `incident.json`.

        Returns:
            Its directory.

        Raises:
            BundleError: there is no step, or the bundle cannot be written.
        """
        window = self._run.progress.window
        if window is None:
            raise BundleError(
                "There is no step to write down: call capture_incident() in a callback or a hook of train()."
            )
        states = rng.capture()
        try:
            found = None if self._engine.holds_parts else self._probe(window)
        finally:
            rng.restore(states)
        is_exact = found is not None and not found.error
        seen = Evidence(states=states, is_exact=is_exact, found=found, all_samples=self._samples(window))
        path, _ = self._write(window, seen, {"kind": REQUEST, "step": self._step, "what": reason})
        if not path:
            raise BundleError(f"No bundle could be written to {self._root}; the log has the reason.")
        return Path(path)

    def hang(self, message: str) -> None:
        """Writes the bundle of a step that does not end, within a limit of time; called by the watchdog.

        Args:
            message: which process waits, and for how long.
        """
        window = self._run.progress.window
        if not self._is_on or window is None:
            return
        on_host = all(tensor.device.type == "cpu" for batch in window.batches for tensor in tensors_of(batch))
        there = window if on_host else Window([], None)  # a copy from a device that hangs would hang too
        has_ended = self._run.progress.is_window_trained
        details = {"kind": HANG, "step": self._step, "what": message, "step_had_ended": has_ended}
        write = threading.Thread(target=self._write, args=(there, Evidence(), details), daemon=True)
        write.start()
        write.join(HANG_TIMEOUT_S)

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        progress = self._run.progress
        return int(progress.state.global_step) + (not progress.is_window_trained)

    @property
    def _model(self) -> Any:
        return self._engine.unwrap(self._hooks.model)

    def _probe(self, *windows: Window) -> Findings:
        is_shared, context = self._engine.holds_parts, self._run.context  # a pass is one of all processes
        model = context.model if is_shared and context is not None else self._model
        losses = (one for window in windows for one in window_losses(self._hooks, self._run, model, window))
        return probe(model, lambda: losses, backward=not is_shared)

    def _look_at(self, window: Window, *, error: str = "") -> Evidence:
        """Finds the random states of before a window, where its bad value began, and which samples made it.

        Where processes hold parts of the weights, all of them look at the same step, and forward passes are run only.
        """
        seen, engine = Evidence(all_samples=self._samples(window)), self._engine
        if engine.holds_parts and (error or engine.updates_in_clip):  # of this process alone, or too late
            return seen
        progress = self._run.progress
        later = [] if progress.window is window else [progress.window]  # whose forward passes have drawn as well
        after = rng.capture()
        try:
            found = self._probe(window, *later)
            repeated = rng.capture()
            before: States | None = after
            has_drawn = not same(after, repeated)
            if any(engine.gather_objects(has_drawn)) if engine.holds_parts else has_drawn:
                before = rewound(after, repeated)
                rng.restore(before or after)
                found = self._probe(window, *later)
            ends_alike = before is not None and same(rng.capture(), after)
            num_losses = len(found.losses)
            if later:
                rng.restore(before or after)
                found = self._probe(window)
            trained = progress.meter.newest(num_losses)[: len(found.losses)]
            is_same = [bundle.bits(one) for one in found.losses] == [bundle.bits(one) for one in trained]
            seen.found, seen.states = found, before or after
            seen.is_exact = ends_alike and (found.error == error if error else is_same)
            if not found.is_finite and found.error == error and not engine.holds_parts:
                seen.rows = bad_rows(self._hooks, self._run, self._model, window, error=found.error) or []
        finally:
            rng.restore(after)
            if engine.holds_parts:
                engine.refresh(self._hooks.model)
        sizes = [find_batch_size(batch) for batch in window.batches]
        if [len(ids) for ids in seen.all_samples] == sizes:
            seen.samples = [seen.all_samples[number][row] for number, row in seen.rows]
        return seen

    def _gathered(self, window: Window, seen: Evidence, details: JSONObject) -> tuple[Window, Evidence, JSONObject]:
        """Gathers the weights of a model in parts, and the batch of the process whose loss is worst, with its rank.

        All processes call it. The main process gets the weights, unless it has a bundle for the same cause.
        """
        engine, progress, rank = self._engine, self._run.progress, int(self._hooks.args.process_index)
        later = 0 if progress.window is window else len(progress.window.batches)
        num = len(window.batches)
        losses = [loss.cpu() for loss in progress.meter.newest((num + later) * progress.num_parts)]
        losses = losses[: num * progress.num_parts]
        worst = engine.gather_objects(max((_badness(one) for one in losses), default=-math.inf))
        chosen = worst.index(max(worst))
        mine: tuple[Any, ...] | None = None
        if rank == chosen:
            batches = [map_tensors(lambda tensor: tensor.cpu(), batch) for batch in window.batches]
            if seen.found is not None:
                seen.found.losses = [loss.cpu() for loss in seen.found.losses]
            mine = batches, replace(seen, trained=losses, states=seen.states or rng.capture())
            try:
                pickle.dumps(mine)
            except Exception as error:  # of the user's objects in a batch; the main process writes its own
                mine = None
                self._tell("Its batch cannot be sent", details["step"], error)
        theirs = engine.gather_objects(mine)[chosen]
        if theirs is not None:
            window, seen = Window(theirs[0], window.num_items), theirs[1]
        if not engine.gather_objects(self._known(_cause(details, seen)) is not None)[0]:
            seen.weights = engine.whole_weights(self._hooks.model)
        bad_ranks = [other for other, loss in enumerate(worst) if loss == math.inf]
        return window, seen, {"bad": bad_ranks, "of_batch": chosen if theirs is not None else 0}

    def _samples(self, window: Window) -> list[list[Any]]:
        """Samples of each micro-batch, as the dataset numbers them."""
        run, progress, num = self._run, self._run.progress, len(window.batches)
        is_past = progress.window is not window or progress.is_window_trained
        first = progress.batches_in_epoch - num * is_past
        if run.loader is None or run.plan is None:
            return []
        epoch, first = (progress.epoch, first) if first >= 0 else (progress.epoch - 1, run.plan.batches_per_epoch - num)
        return run.loader.position.samples_of(epoch, first, num_batches=num)

    def _words_for(self, seen: Evidence) -> str:
        if not seen.rows:
            return ""
        rows = ", ".join(
            str(row) if len(seen.all_samples) == 1 else f"{row} of micro-batch {n}" for n, row in seen.rows
        )
        many = "s" if len(seen.rows) > 1 else ""
        if not seen.samples:
            return f"Row{many} {rows} of its batch made it."
        return f"Sample{many} {', '.join(map(str, seen.samples))} of the training data made it (row{many} {rows})."

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, window: Window, seen: Evidence, details: JSONObject) -> tuple[str, str]:
        """Writes a bundle, unless there is one for the same cause; returns its path and what is known of the incident.

        A failure is logged; the path is empty then.
        """
        origin = seen.found.origin if seen.found is not None else ""
        note = " ".join(filter(None, (origin and f"It began in {origin}.", self._words_for(seen))))
        cause = _cause(details, seen)
        try:
            path = self._known(cause)
            if path is None:
                path = self._commit(window, seen, details, cause)
                self._written[str(cause)] = path
            if not path.is_dir():
                return "", note
        except Exception as error:
            self._tell("Its bundle could not be written", details["step"], error)
            return "", note
        return str(path), f"{note} Replay it with: trainwright replay {path}".strip()

    def _known(self, cause: list[str] | None) -> Path | None:
        """Returns the bundle for the same cause: of this run, or of one before it in the directory."""
        if cause is None or str(cause) in self._written:
            return None if cause is None else self._written[str(cause)]
        return next((path for path in bundle.bundles(self._root) if cause == cause_of(path)), None)

    def _commit(self, window: Window, seen: Evidence, details: JSONObject, cause: list[str] | None) -> Path:
        rank, step = int(self._hooks.args.process_index), int(details["step"])
        kind = details["kind"] + (f"-rank{rank}" if rank else "")
        self._root.mkdir(parents=True, exist_ok=True)
        name = bundle.free_name(self._root, step, kind)
        staging = self._root / f".{name}.{os.getpid()}.staging"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            missing = self._fill(staging, window, seen, is_hang=details["kind"] == HANG)
            store = CheckpointStore(self._folder)
            newest = max(store.owned_by(self._run.run_id) - store.non_finite(), default=None)
            parent = {} if newest is None else {"path": f"../../{store.path(newest).name}", "step": newest}
            about = {**self._about(window, seen), **details, "cause": cause, "missing": missing, "parent": parent}
            about["replay"] = f"trainwright replay {self._root / name}"
            bundle.write_json(staging / bundle.INCIDENT, about)
            files = describe_files(staging)
            if newest is not None:
                link_unchanged(staging, files, store.path(newest))
            Manifest(step=step, run_id=self._run.run_id, files=files).write(staging)
            flush(staging)
            staging.rename(self._root / name)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        for old in bundle.bundles(self._root)[: -bundle.MOST_KEPT]:
            logger.info("Deleting %s: the newest %d incidents are kept.", old, bundle.MOST_KEPT)
            shutil.rmtree(old, ignore_errors=True)
        return self._root / name

    def _fill(self, folder: Path, window: Window, seen: Evidence, *, is_hang: bool) -> dict[str, str]:
        """Writes the parts of a bundle, each if it can be; returns the reasons of those that are missing."""
        missing: dict[str, str] = {}

        def part(name: str, write: Any) -> None:  # a function without arguments
            try:
                reason = write()
                if reason:
                    missing[name] = reason
            except Exception as error:  # of a device that failed, or of an object that cannot be written
                missing[name] = f"{type(error).__name__}: {without_tokens(str(error))}"

        def batches() -> str:
            lost = bundle.write_batches(window.batches, folder)
            return f"kept as text only: {', '.join(lost)}" if lost else ""

        def weights() -> str:
            from trainwright.checkpoint.weights import save_weights

            model, free = self._model, async_writer.free_bytes(self._root)
            if self._engine.holds_parts and not seen.weights:
                return "each process has a part of them"
            if free is not None and free < 2 * async_writer.weights_bytes(model):
                return f"only {async_writer.size_text(free)} are free"
            save_weights(model, folder, state_dict=None if seen.weights is None else dict(seen.weights))
            return ""

        part("batch", batches)
        part("random states", lambda: bundle.write_random_states(seen.states or rng.capture(), folder))
        if is_hang:
            part("stacks", lambda: _write_stacks(folder))
        if is_hang and self._engine.device.type != "cpu":
            missing["weights"] = "the device may not answer"
        else:
            part("weights", weights)
        return missing

    def _about(self, window: Window, seen: Evidence) -> JSONObject:
        run, args, found, model = self._run, self._hooks.args, seen.found, self._model
        losses = seen.trained if found is None else found.losses
        num_items = window.num_items
        return {
            "format": 1,
            "time": time.time(),
            "run_id": run.run_id,
            "epoch": run.progress.epoch,
            "num_processes": self._engine.num_processes,
            "samples": seen.all_samples,
            "bad_samples": seen.samples,
            "bad_rows": seen.rows,
            "weights_not_finite": weights_not_finite(model),
            "entries_not_finite": [entries_not_finite(batch) for batch in window.batches],
            "origin": found.origin if found is not None else "",
            "module": found.module if found is not None else "",
            "largest_gradients": found.largest if found is not None else {},
            "error": found.error if found is not None else "",
            "losses": [float(loss) for loss in losses],
            "loss_bits": [bundle.bits(loss) for loss in losses],
            "is_exact": seen.is_exact,
            "num_items": float(num_items) if num_items is not None else None,
            "num_items_is_tensor": isinstance(num_items, torch.Tensor),
            "num_parts": run.progress.num_parts,
            "loss_rule": asdict(run.loss_rule) if run.loss_rule is not None else {},
            "model_class": type(model).__name__,
            "is_pretrained": is_instance_of(model, "transformers", "PreTrainedModel"),
            "attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", None),
            "modules_in_eval_mode": [name for name, module in model.named_modules() if not module.training],
            "device": self._engine.device.type,
            "environment": record.environment(self._engine.device),
            "arguments": record.changed_arguments(args),
            "loss_settings": {name: value_of(args, name) for name in LOSS_SETTINGS},
        }

    def _tell(self, what: str, step: int, error: Exception) -> None:
        logger.warning("Incident of step %d: %s: %s: %s", step, what, type(error).__name__, without_tokens(str(error)))


# Arguments that decide about the numbers of forward and backward.
LOSS_SETTINGS = (
    "bf16", "fp16", "tf32", "label_smoothing_factor", "neftune_noise_alpha", "full_determinism", "seed", "past_index",
)  # fmt: skip


def _badness(loss: torch.Tensor) -> float:
    return float(loss) if loss.isfinite() else math.inf


def _cause(details: JSONObject, seen: Evidence) -> list[str] | None:
    """Returns what is not written down twice; None for what has no cause that may come again."""
    if details["kind"] in (REQUEST, HANG):
        return None
    origin = seen.found.origin if seen.found is not None else ""
    return [details["kind"], origin or details["what"], *map(str, seen.samples or seen.rows)]


def cause_of(folder: Path) -> list[str] | None:
    """Returns the cause of a bundle; None for one that was requested, or that cannot be read."""
    try:
        cause: list[str] | None = bundle.read_object(folder, bundle.INCIDENT).get("cause")
    except BundleError:
        return None
    return cause


def _write_stacks(folder: Path) -> None:
    with (folder / bundle.STACKS).open("w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
