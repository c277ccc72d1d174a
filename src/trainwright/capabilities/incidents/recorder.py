"""Incident bundles of a run: collects the facts about a bad step, writes them, and keeps the newest.

Training continues.

In a healthy step, only the random states from before the forward passes are copied (`forward_states.py`), and only for
a model that draws random numbers. When an incident is known, its batches are still in the loop, and the weights are
still as before the step. The forward passes are run again, which shows whether the losses are the same, and finds the
first module with a non-finite value; parts of the batch then find the samples. A failure of any of this is only logged.
"""

from __future__ import annotations

import logging
import math
import pickle
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright._types import Batch, JSONObject, without_tokens
from trainwright.capabilities.incidents import bundle, contents
from trainwright.capabilities.incidents.contents import Evidence
from trainwright.capabilities.incidents.forward_states import ForwardStates
from trainwright.capabilities.incidents.probe import Findings, probe
from trainwright.checkpoint import rng
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.checkpoint.rng import States
from trainwright.checkpoint.store import CheckpointStore, flush, link_unchanged
from trainwright.config.fields import get_value
from trainwright.data.prepared_dataloader import map_tensors
from trainwright.data.row_names import NamesOf
from trainwright.engine.base import Engine
from trainwright.errors import BadStepError, BundleError, DataError
from trainwright.loop.extension import Extension, Run
from trainwright.loop.incident import Incident
from trainwright.loop.retry import split_batches
from trainwright.loop.step import Window
from trainwright.support.tensor_tree import find_batch_size, iterate_tensors

logger = logging.getLogger(__name__)
OUT_OF_MEMORY_CURE = (
    "The step does not fit into memory. A smaller per_device_train_batch_size with more gradient_accumulation_steps "
    "has the same effect; auto_find_batch_size=True finds the size; activation_checkpointing=True keeps fewer "
    "activations."
)
# With auto_find_batch_size, if another attempt cannot help.
UPDATE_CURE = (
    "Out of memory in the optimizer's update. auto_find_batch_size=True does not retry that: some weights may "
    "already be updated, and smaller micro-batches do not shrink the optimizer. The last checkpoint is "
    "intact. An optimizer with less state, such as optim='adafactor', or sharding the model over processes frees "
    "memory."
)
SMALLEST_CURE = (
    "auto_find_batch_size=True cannot make it fit. activation_checkpointing=True keeps fewer activations; an optimizer "
    "with less state, such as optim='adafactor', or sharding the model over processes frees memory."
)

# bad steps of a run to investigate, so that a run in which every step is bad does not take twice as long
MOST_LOOKED_AT = 20
# Beginnings of the texts of errors that no other sample would have avoided.
NO_ROWS_FAULT = ("ImportError", "ModuleNotFoundError", "NotImplementedError")
HANG_TIMEOUT_S = 20.0  # for the bundle of a hang


class IncidentRecorder(Extension):
    """Writes the bundles of one run below its output directory.

    Args:
        hooks: the trainer.
        run: the run, which provides the step.
        engine: engine of the run.
        folder: the output directory.
        names: names of the samples of the training data.
    """

    name = "incidents"
    order = 100  # after others have rewound a bad step, and before them at its beginning

    def __init__(
        self,
        hooks: contents.ReplayHooks,
        run: contents.RecordedRun,
        engine: Engine,
        folder: str,
        *,
        names: NamesOf,
    ) -> None:
        self._hooks = hooks
        self._names = names
        self._run = run
        self._forward_states: ForwardStates | None = None  # None if no bundles of bad steps are wanted
        self._engine = engine
        self._folder = Path(folder)
        self._root = self._folder / bundle.FOLDER
        self._is_on = get_value(hooks.args, "incidents")
        self._num_looked_at = 0
        self._has_compared = False  # the random states around the first step
        self._written: dict[str, Path] = {}  # cause -> bundle, which may have been deleted

    # -- events ------------------------------------------------------------------------------------------------------

    def listens_to(self) -> set[str]:
        """Excludes the events of a step if no bundle is wanted, or once the model was seen to draw no random number."""
        events = super().listens_to()
        if self._has_compared:
            events -= {"after_step"}
        states = self._forward_states
        return events if self._is_on and (states is None or states.is_needed) else events - {"window", "after_step"}

    def begin(self, run: Run) -> None:
        """Sets up the copies of random states, and the watchdog of several processes."""
        if self._is_on:
            self._forward_states = ForwardStates(capture=rng.capture, capture_torch=rng.capture_torch, same=rng.same)
        meeting = run.progress.interrupts.meeting
        if meeting is not None:
            meeting.on_hang = self.hang

    def window(self, batches: Sequence[Batch]) -> None:
        """Copies the random states before the forward passes."""
        assert self._forward_states is not None
        self._forward_states.begin_step(batches)

    def after_step(self, run: Run) -> None:
        """Compares the random states after the first step."""
        assert self._forward_states is not None
        self._forward_states.end_step()
        self._has_compared = True
        run.extensions.listen_anew()

    def on_error(self, error: BaseException) -> None:
        """Writes the bundle of an error raised inside a step; other errors have none."""
        self.failed(error)

    # -- the four causes -----------------------------------------------------------------------------------------------

    def record(self, incident: Incident, window: object) -> Incident:
        """Investigates a bad step and writes its bundle; returns the incident with its samples and the bundle's path.

        All processes must call it for the same step, each with its own micro-batches as `window`.
        """
        if not self._is_on or not isinstance(window, Window) or self._num_looked_at >= MOST_LOOKED_AT:
            return incident
        self._num_looked_at += 1
        engine = self._engine
        rank = int(self._hooks.args.process_index)
        names = ("kind", "step", "action", "what", "values", "threshold")
        details = {name: getattr(incident, name) for name in names}
        seen = Evidence()
        try:
            seen = self._look_at(window)
        except Exception as error:
            self._tell("It could not be investigated", incident.step, error)
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
            written = replace(incident, samples=tuple(seen.samples), names=tuple(seen.names), note=note, path=path)
        return engine.gather_objects(written)[writer]

    def _cure(self) -> str:
        """The advice after an out-of-memory error."""
        if self._run.setup.smaller_batches is None:
            return OUT_OF_MEMORY_CURE
        return UPDATE_CURE if self._run.progress.is_updating else SMALLEST_CURE

    def failed(self, error: BaseException) -> None:
        """Writes the bundle of an error raised inside a step; other errors have none.

        An out-of-memory error gets a note with advice.
        """
        window = self._run.progress.window.current
        # signals, an error raised by a guard, or by a check of the data, which says what to change
        is_found = not isinstance(error, Exception) or isinstance(error, (BadStepError, DataError))
        is_full = self._engine.is_out_of_memory(error)
        if is_full and window is not None:
            error.add_note(self._cure())
        if not self._is_on or is_found or window is None or self._run.progress.window.is_trained:
            return
        text = f"{type(error).__name__}: {without_tokens(str(error))}"
        seen = Evidence()
        try:
            seen = Evidence(states=self._states_before(window)) if is_full else self._look_at(window, error=text)
        except Exception as second:
            self._tell("It could not be investigated", self._step, second)
        kind = contents.OUT_OF_MEMORY if is_full else contents.ERROR
        has_begun = self._run.progress.is_updating
        details = {"kind": kind, "step": self._step, "what": text, "error": text, "update_had_begun": has_begun}
        path, note = self._write(window, seen, details)
        if path:
            logger.warning("Step %d: %s. %s", self._step, text.rstrip("."), note)

    def request(self, reason: str) -> Path:
        """Writes the bundle of the current step, or of the last step with the current weights; returns its directory.

        `reason` goes into `incident.json`. Raises BundleError if there is no step, or the bundle cannot be written.
        """
        window = self._run.progress.window.current
        if window is None:
            raise BundleError(
                "There is no step to capture: call capture_incident() in a callback or a hook of train()."
            )
        states = rng.capture()
        try:
            found = None if self._engine.holds_parts else self._probe(window)
        finally:
            rng.restore(states)
        is_exact = found is not None and not found.error
        seen = Evidence(states=states, is_exact=is_exact, found=found, all_names=self._names_in(window))
        path, _ = self._write(window, seen, {"kind": contents.REQUEST, "step": self._step, "what": reason})
        if not path:
            raise BundleError(f"No bundle could be written to {self._root}; the log has the reason.")
        return Path(path)

    def hang(self, message: str) -> None:
        """Writes the bundle of a step that hangs, within a time limit; called by the watchdog."""
        window = self._run.progress.window.current
        if not self._is_on or window is None:
            return
        on_host = all(tensor.device.type == "cpu" for batch in window.batches for tensor in iterate_tensors(batch))
        there = window if on_host else Window([], None)  # a copy from a device that hangs would hang too
        has_ended = self._run.progress.window.is_trained
        details = {"kind": contents.HANG, "step": self._step, "what": message, "step_had_ended": has_ended}
        seen = Evidence(states=self._states_before(window))
        write = threading.Thread(target=self._write, args=(there, seen, details), daemon=True)
        write.start()
        write.join(HANG_TIMEOUT_S)

    # -- investigation -------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        progress = self._run.progress
        return int(progress.state.global_step) + (not progress.window.is_trained)

    @property
    def _model(self) -> Any:
        return self._engine.unwrap(self._hooks.model)

    def _states_before(self, window: Window) -> States:
        """Returns the random states before a window's forward passes; current states for generators without a copy."""
        return rng.capture() | (self._kept_states(window) or {})

    def _kept_states(self, window: Window) -> States | None:
        return None if self._forward_states is None else self._forward_states.select_moving(window.batches)

    def _probe(self, window: Window) -> Findings:
        is_shared = self._engine.holds_parts  # a pass then involves all processes
        model = self._run.setup.model if is_shared and self._run.is_training else self._model
        losses = contents.window_losses(self._hooks, self._run, model, window)
        return probe(model, lambda: losses, backward=not is_shared)

    def _look_at(self, window: Window, *, error: str = "") -> Evidence:
        """Repeats a window from its random states: where its bad value began, and which samples caused it.

        If processes hold parts of the weights, all of them investigate the same step, with forward passes only.
        """
        before = self._states_before(window)
        engine = self._engine
        seen = Evidence(all_names=self._names_in(window), states=before)
        if engine.holds_parts and (error or engine.updates_in_clip):  # only in this process, or too late
            return seen
        progress = self._run.progress
        kept = self._kept_states(window)
        after = rng.capture()
        try:
            rng.restore(before)
            found = self._probe(window)
            # a pass must not draw from a generator without a copy
            is_known = kept is not None and rng.same(_without(kept, before), _without(kept, rng.capture()))
            num_later = 0 if progress.window.current is window else self._num_losses(progress.window.current)
            trained = progress.meter.newest(len(found.losses) + num_later)[: len(found.losses)]
            is_same = [bundle.bits(one) for one in found.losses] == [bundle.bits(one) for one in trained]
            seen.found = found
            seen.is_exact = is_known and (found.error == error if error else is_same)
            is_repeated = not found.is_finite and found.error == error and not engine.holds_parts
            if is_repeated and not error.startswith(NO_ROWS_FAULT):
                seen.rows = contents.bad_rows(self._hooks, self._run, self._model, window, error=found.error) or []
                num_rows = sum(find_batch_size(batch) or 0 for batch in window.batches)
                if len(seen.rows) == num_rows > 1:
                    seen.rows = []  # what each sample does is not due to one of them
        finally:
            rng.restore(after)
            if engine.holds_parts:
                engine.begin_epoch(self._hooks.model)
        sizes = [find_batch_size(batch) for batch in window.batches]
        if [len(names) for names in seen.all_names] == sizes:
            samples = self._samples(window)
            seen.samples = [samples[number][row] for number, row in seen.rows]
            seen.names = [seen.all_names[number][row] for number, row in seen.rows]
            seen.described = [one for sample in seen.samples for one in self._names.described(sample)]
        return seen

    def _num_losses(self, window: Window | None) -> int:
        """Returns the number of losses of a window, one per micro-batch or part of one."""
        return 0 if window is None else len(split_batches(window.batches, self._run.progress.window.num_parts))

    def _gathered(self, window: Window, seen: Evidence, details: JSONObject) -> tuple[Window, Evidence, JSONObject]:
        """Gathers the weights of a sharded model, and the batch and rank of the process with the worst loss.

        All processes must call it. The main process gets the weights, unless it has a bundle for the same cause.
        """
        engine = self._engine
        progress = self._run.progress
        rank = int(self._hooks.args.process_index)
        later = 0 if progress.window.current is window else len(progress.window.current.batches)
        num = len(window.batches)
        losses = [loss.cpu() for loss in progress.meter.newest((num + later) * progress.window.num_parts)]
        losses = losses[: num * progress.window.num_parts]
        worst = engine.gather_objects(
            max((float(one) if one.isfinite() else math.inf for one in losses), default=-math.inf)
        )
        chosen = worst.index(max(worst))
        mine: tuple[Any, ...] | None = None
        if rank == chosen:
            batches = [map_tensors(lambda tensor: tensor.cpu(), batch) for batch in window.batches]
            if seen.found is not None:
                seen.found.losses = [loss.cpu() for loss in seen.found.losses]
            mine = batches, replace(seen, trained=losses, states=seen.states or rng.capture())
            try:
                pickle.dumps(mine)
            except Exception as error:  # raised by the user's objects in a batch; the main process then writes its own
                mine = None
                self._tell("Its batch cannot be sent", details["step"], error)
        theirs = engine.gather_objects(mine)[chosen]
        if theirs is not None:
            window = replace(window, batches=theirs[0])
            seen = theirs[1]
        if not engine.gather_objects(self._known(contents.cause_in(details, seen)) is not None)[0]:
            seen.weights = engine.whole_weights(self._hooks.model)
        bad_ranks = [other for other, loss in enumerate(worst) if loss == math.inf]
        return window, seen, {"bad": bad_ranks, "of_batch": chosen if theirs is not None else 0}

    def _samples(self, window: Window) -> list[list[Any]]:
        """Returns the samples of each micro-batch, by number in the dataset."""
        loader = self._run.loader
        if loader is None or not loader.position.names_rows or not all(window.sample_ids):
            return []
        return [list(ids) for ids in window.sample_ids]

    def _names_in(self, window: Window) -> list[list[str]]:
        """Returns the names of the samples of each micro-batch."""
        return [list(map(self._names.text, ids)) for ids in self._samples(window)]

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, window: Window, seen: Evidence, details: JSONObject) -> tuple[str, str]:
        """Writes a bundle, unless the same cause has one; returns its path and a note for the incident.

        A failure is logged, and the path is then empty.
        """
        origin = seen.found.origin if seen.found is not None else ""
        note = " ".join(filter(None, (origin and f"It began in {origin}.", contents.words_for(seen))))
        cause = contents.cause_in(details, seen)
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
        """Returns the bundle for the same cause, from this run, also before it was resumed."""
        if cause is None or str(cause) in self._written:
            return None if cause is None else self._written[str(cause)]
        run_id = self._run.run_id
        return next((path for path in bundle.bundles(self._root) if cause == contents.find_cause(path, run_id)), None)

    def _commit(self, window: Window, seen: Evidence, details: JSONObject, cause: list[str] | None) -> Path:
        rank = int(self._hooks.args.process_index)
        step = int(details["step"])
        kind = details["kind"] + (f"-rank{rank}" if rank else "")
        name = bundle.free_name(self._root, step, kind)
        staging = bundle.make_staging(self._folder, name)
        try:
            engine = self._engine
            model = self._model
            missing = contents.fill(
                staging, window, seen, engine=engine, model=model, is_hang=details["kind"] == contents.HANG
            )
            store = CheckpointStore(self._folder)
            newest = max(store.owned_by(self._run.run_id) - store.non_finite(), default=None)
            parent = {} if newest is None else {"path": f"../../{store.path(newest).name}", "step": newest}
            facts = contents.about(window, seen, run=self._run, args=self._hooks.args, engine=engine, model=model)
            facts |= {**details, "cause": cause, "missing": missing, "parent": parent}
            facts["replay"] = f"trainwright replay {self._root / name}"
            bundle.write_json(staging / bundle.INCIDENT, facts)
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

    def _tell(self, what: str, step: int, error: Exception) -> None:
        logger.warning("Incident of step %d: %s: %s: %s", step, what, type(error).__name__, without_tokens(str(error)))


def _without(names: States, states: States) -> States:
    """Returns the states of the other generators."""
    return {name: state for name, state in states.items() if name not in names}
