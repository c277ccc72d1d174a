"""Evaluation beside training, as an extension: another process evaluates, and its result is delivered when it arrives.

An evaluation that is due is taken from the loop in `settle`, after guards and averages have settled, before the log.
The weights go to the disk, and training continues. A result is delivered after the step during which it came, in the
order of requests: to logs, callbacks, trackers, the journal and the choice of the best checkpoint, with the step that
it belongs to. All processes deliver it after the same step. While no evaluation is open, a step does nothing for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainwright._types import JSONObject, StateDict, counted
from trainwright.capabilities.async_evaluation.evaluators import Evaluator
from trainwright.capabilities.async_evaluation.requests import (
    LOG,
    MAIN_PART,
    STATES_NAME,
    EvaluationRequest,
    Requests,
    Result,
    parse_list,
)
from trainwright.checkpoint import rng
from trainwright.checkpoint.store import CheckpointStore
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError, CheckpointError, ProcessFailedError
from trainwright.loop.extension import Extension, Run
from trainwright.state.interrupts import Interrupted
from trainwright.state.progress import EVALUATION

logger = logging.getLogger(__name__)

MOST_OPEN = 2  # evaluations at a time: one under way, one waiting
WAITS_S = 1.0  # between two looks at signals
AGREES_EVERY_S = 1.0  # if there are several processes
MOST_STEPS = 1000  # between two agreements

MakeEvaluator = Callable[[Requests], Evaluator]
Arrived = list[tuple[str, Result]]


class AsyncEvaluation(Extension):
    """Has evaluations made by another process.

    Args:
        folder: where the run writes.
        engine: of the run.
        hooks: the trainer.
        make_evaluator: makes the evaluator; called in the main process when the model is ready.
        skips: an evaluation that is due while two are open is skipped; else the run waits.
        is_timed: a time limit may end the run; it does not wait for evaluations then.
        rotate: deletes checkpoints that the arguments no longer want.

    Raises:
        ArgumentError: another process cannot compute as the engine does, or evaluations decide about the training.
    """

    name = "async_evaluation"
    order = 95  # after all that may change the weights of a step

    def __init__(
        self,
        folder: str,
        engine: Engine,
        hooks: Any,
        *,
        make_evaluator: MakeEvaluator,
        skips: bool,
        is_timed: bool,
        rotate: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (reason := engine.keeps_evaluation(hooks.model)) is not None:
            raise ArgumentError(
                f"eval_async needs a copy of the model that another process evaluates with the trained weights, and "
                f"{reason}. Or set eval_async=False."
            )
        self._engine = engine
        self._hooks = hooks
        self._make_evaluator = make_evaluator
        self._skips = skips
        self._is_timed = is_timed
        self._rotate = rotate
        self._clock = clock
        self._requests = Requests(folder)
        self._store = CheckpointStore(folder)
        self._run: Run | None = None
        self._evaluator: Evaluator | None = None  # in the main process
        self._open: dict[str, EvaluationRequest] = {}  # requests that are not delivered, in their order
        self._kept: set[int] = set()  # steps to keep, when the run is over
        self._arrived: dict[str, Result] = {}  # in the main process: results that wait for earlier ones
        self._owed: list[EvaluationRequest] = []  # open in the checkpoint that was resumed
        self._is_decided = False  # an evaluation has ended the training: a run that waits would make no further one
        self._saved: set[int] = set()  # steps that have a checkpoint, or will have one soon
        self._next_step = 0  # step of the next agreement
        self._last = 0, 0.0  # step and time of the last one

    # -- before the first step -----------------------------------------------------------------------------------------

    def model_ready(self, run: Run) -> None:
        """Starts the evaluator while the data are read; ArgumentError for a part that another process cannot have."""
        self._engine.agree(self._start)

    def _start(self) -> None:
        self._evaluator = self._make_evaluator(self._requests)
        self._evaluator.start()

    def load_state_dict(self, state: StateDict) -> None:
        """Takes over the evaluations that were open in a checkpoint; CheckpointError if it says something else."""
        try:
            self._owed = [EvaluationRequest.from_dict(values) for values in parse_list(state.get("open", []))]
        except (AttributeError, ValueError) as error:
            raise CheckpointError(
                f"The open evaluations of the checkpoint cannot be read: {error}. Resume from another checkpoint, or "
                "with eval_async=False."
            ) from error

    def begin(self, run: Run) -> None:
        """Waits until evaluations can be made, and makes up the open ones in a checkpoint.

        Raises:
            ArgumentError: evaluations decide about the training, or the other process cannot evaluate.
        """
        setup = run.setup
        if setup.follows_metrics(setup.scheduler):
            raise ArgumentError(
                "eval_async=True brings a metric steps later, and the learning rate follows the metric of an "
                "evaluation: the weights would depend on how long one takes. Use another lr_scheduler_type, or "
                "eval_async=False."
            )
        self._run = run
        self._open = {request.name: request for request in self._owed}
        self._owed = []
        checkpoint = run.start.checkpoint
        self._saved = set(self._engine.agree(self._store.steps)) if checkpoint is not None else set()
        problem = self._engine.agree(lambda: self._open_requests(is_fresh=checkpoint is None))
        while problem is None:
            problem = self._engine.agree(self._find_problem)
            run.progress.interrupts.passes()
        if problem:
            raise ArgumentError(f"eval_async=True: the process that evaluates could not begin: {problem}")
        self._engine.agree(self._submit_open)
        self._last = run.progress.state.global_step, self._clock()

    def _open_requests(self, *, is_fresh: bool) -> str | None:
        """Opens the directory of requests; returns a problem."""
        try:
            self._requests.open(is_fresh=is_fresh)
        except OSError as error:
            return f"{self._requests.folder} cannot be written to: {error}"
        self._requests.drop_others(set(self._open))
        return None

    def _find_problem(self) -> str | None:
        assert self._evaluator is not None
        return self._evaluator.find_problem(WAITS_S)

    def _submit_open(self) -> None:
        """Submits the open evaluations in a checkpoint, or takes their results; in the main process."""
        assert self._evaluator is not None
        for name, request in self._open.items():
            try:
                result = Result.read(self._requests.place(name))
            except (OSError, ValueError) as error:
                result = Result(missing=str(error))
            if result is not None:
                self._arrived[name] = result
            elif self._requests.read(name) is not None:
                self._evaluator.submit(request)
            else:
                self._arrived[name] = Result(missing=f"{self._requests.place(name)} is gone")
        if self._open:
            steps = ", ".join(str(request.step) for request in self._open.values())
            logger.info("Evaluations that were open in the checkpoint are made up, of step %s.", steps)

    # -- requests ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Takes the evaluation that is due from the loop, and asks the other process for it."""
        run = self._run
        if run is None or not run.progress.control.should_evaluate or run.progress.is_interrupted:
            return
        if self._is_decided:
            run.progress.control.should_evaluate = False
            return
        before = run.progress.clock.mark(EVALUATION)
        try:
            obstacle = self._wait_for_room(run)
        except Interrupted:  # as if the signal had come before: the step is logged, and its evaluation stays due
            run.progress.clock.mark(before)
            return
        if obstacle:
            logger.warning("The evaluation of step %d is skipped: %s.", run.progress.state.global_step, obstacle)
        else:
            self._request(run)
        run.progress.control.should_evaluate = False
        run.progress.clock.mark(before)

    def _wait_for_room(self, run: Run) -> str:
        """Waits until a further evaluation may be open; returns why it is skipped instead, "" if it is made.

        The last evaluation of a run is never skipped.
        """
        is_last = run.progress.control.should_training_stop
        while True:
            answer = self._engine.agree(lambda: self._look_for_room(waits=is_last or not self._skips))
            if answer is not None:
                return answer
            run.progress.interrupts.passes()

    def _look_for_room(self, *, waits: bool) -> str | None:
        """Returns "" if there is room, a reason not to wait for it, or None to look again; in the main process."""
        evaluator = self._evaluator
        assert evaluator is not None
        self._take()
        if evaluator.num_open < MOST_OPEN:
            return ""
        are_open = f"{counted(evaluator.num_open, 'evaluation')} are under way"
        if not waits:
            return f"{are_open} (eval_queue='skip')"
        if evaluator.is_gone:
            return f"{are_open}, and no process watches the run (trainwright eval RUN --data FILE --watch)"
        evaluator.wait(WAITS_S)
        return None

    def _request(self, run: Run) -> None:
        """Writes weights and circumstances of the step for the other process."""
        state = run.progress.state
        keys = run.setup.ignore_keys_for_eval
        request = EvaluationRequest(
            name=self._engine.agree(lambda: self._requests.new_name(state.global_step)),
            step=state.global_step,
            epoch=state.epoch,
            max_steps=state.max_steps,
            num_tokens=state.num_input_tokens_seen,
            parts=(),
            ignore_keys=None if keys is None else tuple(keys),
        )
        parts: list[str] = []

        def write(prefix: str) -> dict[str, float]:
            self._write_weights(request.name, prefix, is_first=not parts)
            parts.append(prefix)
            return {}

        try:
            write(MAIN_PART)
            run.extensions.reporting.evaluate_further(run, write)
        except OSError as error:
            logger.error("Step %d is not evaluated: its weights cannot be written: %s", request.step, error)
            if state.is_world_process_zero:
                self._requests.drop(request.name)
            return
        for prefix in parts:
            request = request.with_part(prefix)
        self._open[request.name] = request
        self._engine.agree(lambda: self._submit(request))

    def _write_weights(self, name: str, prefix: str, *, is_first: bool) -> None:
        """Writes the weights that the model has now; all processes call it, and fail together."""
        hooks = self._hooks
        whole = self._engine.finished_weights(hooks.model)

        def write() -> None:
            place = self._requests.begin(name) if is_first else self._requests.place(name)
            weights = str(self._requests.weights(name, prefix))
            if whole is None:
                hooks._save(weights)
            else:
                hooks._save(weights, state_dict=dict(whole))
            if is_first:
                rng.save(place / STATES_NAME, rng.capture())

        self._engine.agree(write)

    def _submit(self, request: EvaluationRequest) -> None:
        assert self._evaluator is not None
        self._requests.submit(request)
        self._evaluator.submit(request)

    # -- results -------------------------------------------------------------------------------------------------------

    def after_step(self, run: Run) -> None:
        """Delivers results that are there; all processes do it after the same step."""
        if not self._open:
            return
        step = run.progress.state.global_step
        if step < self._next_step:
            return
        arrived, num_steps = self._engine.agree(lambda: (self._take(), self._steps_until_next(step)))
        self._next_step = step + num_steps
        if not arrived:
            return
        self._deliver(run, arrived)
        if self._is_decided and self._hooks.args.save_strategy != "no":
            run.progress.control.should_save = True  # training ends at a step at which it would not save

    def _take(self) -> Arrived:
        """Returns the results to deliver, up to the first request without a result; in the main process."""
        assert self._evaluator is not None
        for name, result in self._evaluator.take():
            self._arrived[name] = result
        arrived: Arrived = []
        for name in self._open:
            if name not in self._arrived:
                break
            arrived.append((name, self._arrived[name]))
        return arrived

    def _steps_until_next(self, step: int) -> int:
        """Returns the steps until the processes agree again."""
        if self._engine.num_processes == 1:
            return 1
        before, began = self._last
        now = self._clock()
        self._last = step, now
        seconds_a_step = (now - began) / max(step - before, 1)
        return max(1, min(MOST_STEPS, int(AGREES_EVERY_S / max(seconds_a_step, 1e-6))))

    def _deliver(self, run: Run, arrived: Arrived) -> None:
        """Tells the run of results, each with the step that it belongs to."""
        before = run.progress.clock.mark(EVALUATION)
        for name, result in arrived:
            request = self._open.pop(name)
            self._arrived.pop(name, None)
            if result.error:
                raise ProcessFailedError(
                    f"The evaluation of step {request.step} failed in its process.\n{result.error}"
                )
            if result.missing:
                logger.error("Step %d has no evaluation: %s.", request.step, result.missing.rstrip("."))
            else:
                with at_step(request, run) as told:
                    self._tell(run, request, result)
                self._is_decided = told.is_stopped
            if run.progress.state.is_world_process_zero:
                self._requests.drop_weights(request)
            if self._is_decided:
                self._leave_out_later_ones(run, request.step)
                break
        run.progress.clock.mark(before)

    def _leave_out_later_ones(self, run: Run, step: int) -> None:
        """Drops the evaluations of later steps: a run that waits for each would not have made them."""
        if self._open:
            steps = ", ".join(str(request.step) for request in self._open.values())
            logger.info("The evaluation of step %d ends the training, so that of step %s is dropped.", step, steps)
        if run.progress.state.is_world_process_zero:
            for name in self._open:
                self._requests.drop(name)
        self._open = {}

    def _tell(self, run: Run, request: EvaluationRequest, result: Result) -> None:
        hooks = self._hooks
        state = run.progress.state
        for kind, values in result.events:
            if kind == LOG:
                hooks.log(dict(values))
            else:
                run.setup.events.fire("on_evaluate", run.progress, metrics=dict(values))
        hooks._report_to_hp_search(run.setup.trial, request.step, result.metrics)
        is_best = hooks._determine_best_metric(metrics=result.metrics, trial=run.setup.trial)
        if is_best and request.step in self._saved:
            state.best_model_checkpoint = str(self._store.path(request.step))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def before_save(self, run: Run) -> None:
        """Remembers the step: its checkpoint may turn out to be the best."""
        self._saved.add(run.progress.state.global_step)

    def keeps(self) -> set[int]:
        """Returns the steps whose evaluations are open, and the best so far: their checkpoints stay."""
        run = self._run
        if run is None:
            return self._kept
        steps = {request.step for request in list(self._open.values())}
        best = run.progress.state.best_global_step
        return steps if best is None else steps | {best}

    def state_dict(self) -> StateDict:
        """Returns the evaluations that are open, which a resume makes up."""
        return {"open": [request.to_dict() for request in self._open.values()]}

    # -- the end -------------------------------------------------------------------------------------------------------

    def trained(self, run: Run) -> None:
        """Waits for all evaluations, unless a time limit or a signal ends the run."""
        state = run.progress.state
        is_cut_off = self._is_timed and state.global_step < state.max_steps
        while self._open and not is_cut_off:
            arrived, is_over = self._engine.agree(lambda: self._wait_for_results(run))
            self._deliver(run, arrived)
            if is_over:
                break
        if self._open:
            steps = ", ".join(str(request.step) for request in self._open.values())
            logger.warning(
                "The run ends before the evaluation of step %s is there. A resume from a checkpoint in which it is "
                "open makes it up.",
                steps,
            )

    def _wait_for_results(self, run: Run) -> tuple[Arrived, bool]:
        """Returns the results that are there, and whether no more is waited for; in the main process."""
        evaluator = self._evaluator
        assert evaluator is not None
        arrived = self._take()
        if arrived:
            return arrived, False
        if evaluator.is_gone or run.progress.interrupts.was_signalled:
            return [], True
        evaluator.wait(WAITS_S)
        return self._take(), False

    def finish(self, run: Run) -> None:
        """Deletes checkpoints that were only kept for their evaluations."""
        if run.progress.state.is_world_process_zero and not run.progress.is_interrupted:
            self._rotate()

    def close(self) -> None:
        """Stops the evaluator, and lets go of the run."""
        if self._evaluator is not None:
            self._evaluator.stop()
            self._evaluator = None
            self._requests.close()
        self._kept = self.keeps()  # copies are still sent, and deleted, after this
        self._run = None
        self._open = {}
        self._arrived = {}


@dataclass(slots=True)
class Told:
    """Whether a listener to an evaluation has stopped the training."""

    is_stopped: bool = False


@contextmanager
def at_step(request: EvaluationRequest, run: Run) -> Iterator[Told]:
    """Context in which the record has the step of an evaluation; flags that are set before stay set."""
    progress = run.progress
    state = progress.state
    control = progress.control
    progress.settle_tokens()
    now: JSONObject = {name: getattr(state, name) for name in ("global_step", "epoch", "num_input_tokens_seen")}
    names = ("should_log", "should_evaluate", "should_save", "should_training_stop")
    flags = {name: getattr(control, name) for name in names}
    state.global_step = request.step
    state.epoch = request.epoch
    state.num_input_tokens_seen = request.num_tokens
    control.should_training_stop = False
    told = Told()
    try:
        yield told
    finally:
        told.is_stopped = control.should_training_stop
        for name, value in now.items():
            setattr(state, name, value)
        for name, was_set in flags.items():
            setattr(control, name, was_set or getattr(control, name))
