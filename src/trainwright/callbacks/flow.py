"""Flow of a run: sets the flags to log, evaluate, save and stop, by the arguments, by a metric, and by the clock."""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Callable
from typing import NamedTuple

from trainwright._types import JSONObject, counted, metric_number
from trainwright.callbacks.base import NO_LOGS, Flags, Logs, TiedToProcess, TrainerCallback
from trainwright.config.behaviour import get_behaviour
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.state.trainer_state import ExportableState, TrainerControl, TrainerState

logger = logging.getLogger(__name__)


def _is_due(step: int, interval: float | None) -> bool:
    # An interval may be negative, as in transformers.
    return interval is not None and interval != 0 and step % interval == 0


def is_log_due(args: Arguments, state: TrainerState, step: int) -> bool:
    """Returns whether a step is logged by its number; epochs, callbacks and the end of a run log too."""
    is_first = step == 1 and args.logging_first_step
    return is_first or (args.logging_strategy == "steps" and _is_due(step, state.logging_steps))


class DefaultFlowCallback(TrainerCallback, original="transformers.trainer_callback"):
    """The usual schedule of a run: logs, evaluates and saves by steps, by epochs or not at all.

    At the last step a run that evaluates or saves by steps does so once more, so that nothing trained is lost.
    """

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> Flags:
        step = state.global_step
        is_last = state.global_step >= state.max_steps
        evaluates = args.eval_strategy == "steps" and (args.eval_delay or 0) <= step
        saves = args.save_strategy == "steps" and (is_last or _is_due(step, max(state.save_steps or 0, 0)))
        control.should_log |= is_log_due(args, state, step)
        control.should_evaluate |= evaluates and (is_last or _is_due(step, state.eval_steps))
        control.should_save |= saves
        control.should_training_stop |= is_last
        return control

    def on_epoch_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> Flags:
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch" and (args.eval_delay or 0) <= state.epoch
        control.should_save |= args.save_strategy == "epoch"
        return control


def end_after(args: Arguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the flags of a last step after the fact, except for actions that this step has already done."""
    step = state.global_step
    evaluates = args.eval_strategy == "steps" and (args.eval_delay or 0) <= step
    control.should_evaluate |= evaluates and not _is_due(step, state.eval_steps)
    control.should_save |= args.save_strategy == "steps" and not _is_due(step, max(state.save_steps or 0, 0))
    control.should_training_stop = True


class EarlyStoppingCallback(TrainerCallback, ExportableState, original="transformers.trainer_callback"):
    """Stops after `early_stopping_patience` evaluations in a row without improvement.

    Args:
        early_stopping_patience: evaluations to wait for an improvement of `metric_for_best_model`.
        early_stopping_threshold: by how much the metric must beat the best one to count as an improvement.

    Raises:
        ArgumentError: when training begins without `metric_for_best_model` or without evaluations.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0
        # evaluations in a row that did not give the metric
        self._num_without = 0
        # Evaluations after training, such as one of the loaded best model, have no next one to wait for.
        self._has_ended = False

    def check_metric_value(
        self, args: Arguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Counts evaluations without improvement over the best metric so far.

        Args:
            args: `greater_is_better` is read.
            state: `best_metric` is read; None before the first evaluation.
            control: not used.
            metric_value: value of `metric_for_best_model` in this evaluation; NaN, None and other values
                do not count as an improvement, even before the first.
        """
        value = metric_number(metric_value)
        best = metric_number(state.best_metric)
        counts_nan = state.best_metric is not None or get_behaviour(args).early_stopping_counts_nan_before_first_best
        if value != value and counts_nan:
            self.early_stopping_patience_counter += 1
            logger.warning(
                "Early stopping counts a metric that is %s as no improvement: %d of %d.",
                reprlib.repr(metric_value),
                self.early_stopping_patience_counter,
                self.early_stopping_patience,
            )
            return
        gain = value - best if args.greater_is_better else best - value
        is_better = best != best or (gain > 0 and gain > (self.early_stopping_threshold or 0.0))
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._has_ended = False
        name = type(self).__name__
        if args.metric_for_best_model is None:
            raise ArgumentError(
                f"{name} watches metric_for_best_model, which is not set. Set it, for example to 'loss'."
            )
        if args.eval_strategy == "no":
            raise ArgumentError(f"{name} needs evaluations, and eval_strategy='no'. Set it to 'steps' or 'epoch'.")
        if not args.load_best_model_at_end:
            effect = "the run ends with the last weights, not with the best ones"
            logger.warning("%s without load_best_model_at_end=True: %s.", name, effect)

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._has_ended = True

    def on_evaluate(
        self, args: Arguments, state: TrainerState, control: TrainerControl, metrics: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        if self._has_ended:
            return
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        if name not in metrics:
            self._num_without += 1
            if self._num_without == 1:  # with an average of the weights, every second evaluation gives it
                return
            logger.warning(
                "Early stopping needs the metric %s, but this evaluation returned %s.",
                name,
                ", ".join(sorted(metrics)),
            )
            return
        self._num_without = 0
        self.check_metric_value(args, state, control, metrics[name])
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
            if state.is_world_process_zero:
                logger.warning(
                    "Early stopping at step %d: %s has not improved for %s; the best was %.4g.",
                    state.global_step,
                    name,
                    counted(self.early_stopping_patience_counter, "evaluation"),
                    metric_number(state.best_metric),
                )

    def state(self) -> JSONObject:  # JSON
        """Returns the settings and the counter, for a checkpoint."""
        settings = ("early_stopping_patience", "early_stopping_threshold")
        return {
            "args": {name: getattr(self, name) for name in settings},
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }


CAUTION = 1.5  # factor: a save may take longer than the longest one before
LOOKS = 0.1  # the clock is read again after this share of the time until something may be due


class FlowDecision(NamedTuple):
    """Decision of one process for all, by its clock."""

    saves: bool  # after this step
    stops: bool
    num_steps: int  # until the next decision


class TimeLimits(TrainerCallback, ExportableState, TiedToProcess):
    """Requests a save at intervals of time, and the end of training early enough for a last save; all in seconds.

    `save_s` returns the time of the longest save so far until it was on disk, 0 before the first, which `first_save_s`
    estimates. `agree` calls a function on the first process and returns its result on all of them.
    """

    looks_at_files = False  # on_save only reads the clock

    def __init__(
        self,
        max_train_s: float | None = None,
        save_every_s: float | None = None,
        *,
        save_s: Callable[[], float] = float,
        first_save_s: float = 0.0,
        agree: Callable[[Callable[[], FlowDecision]], FlowDecision] = lambda decide: decide(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_train_s = max_train_s
        self.save_every_s = save_every_s
        self._agree = agree
        self._clock = clock
        self._save_s = save_s
        self._first_save_s = first_save_s
        self._longest = {"save": 0.0, "step": 0.0, "evaluation": 0.0}
        self._began = self._saved = self._asked = clock()
        self._step_began: float | None = None
        self._num_steps = self._next_look = 0
        self.owes_evaluation = False

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._began = self._saved = self._asked = self._clock()
        self._step_began = None
        self._num_steps = 0
        self._next_look = 0
        self.owes_evaluation = False

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        now = self._clock()
        if self._step_began is not None and self._num_steps > 1:  # from step to step: waiting for data counts
            self._saw("step", now - self._step_began)
        self._step_began = now

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._asked = now = self._clock()
        self._num_steps += 1
        if self._num_steps == 2:
            self._longest["step"] = 0.0  # the first one takes longer: compiling, warming up
        if self._step_began is not None:
            self._saw("step", now - self._step_began)
        if state.global_step >= self._next_look or control.should_evaluate:
            self._obey(self._agree(lambda: self._decide(args, state, control)), state, control)
        if control.should_evaluate or control.should_save or control.should_log:
            self._step_began = None

    def on_epoch_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._asked = self._clock()
        self._step_began = None
        self._obey(self._agree(lambda: self._decide(args, state, control)), state, control)

    def on_evaluate(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        now = self._clock()
        self._saw("evaluation", now - self._asked)
        self._asked = now

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._saved = self._clock()
        self._saw("save", self._saved - self._asked)
        self._next_look = 0

    def state(self) -> JSONObject:  # JSON
        """Returns the pending evaluation, for a checkpoint."""
        return {"args": {}, "attributes": {"owes_evaluation": self.owes_evaluation}}

    def _decide(self, args: Arguments, state: TrainerState, control: TrainerControl) -> FlowDecision:
        now = self._clock()
        longest = self._longest
        until_save = math.inf if self.save_every_s is None else self._saved + self.save_every_s - now
        until_stop = math.inf if self.max_train_s is None else self._began + self.max_train_s - now
        until_stop -= CAUTION * self._last_save_s() + longest["step"]
        is_next = args.eval_strategy == "steps" and _is_due(state.global_step + 1, state.eval_steps)
        until_stop -= longest["evaluation"] if control.should_evaluate or is_next else 0.0
        left = LOOKS * (min(until_save, until_stop) - longest["evaluation"])
        num_steps = max(1, min(10_000, int(left / max(longest["step"], 1e-6)))) if left < math.inf else 1
        return FlowDecision(until_save <= 0, until_stop <= 0 and not control.should_training_stop, num_steps)

    def _obey(self, decision: FlowDecision, state: TrainerState, control: TrainerControl) -> None:
        self._next_look = state.global_step + decision.num_steps
        control.should_save |= decision.saves
        if not decision.stops:
            return
        control.should_save = control.should_training_stop = True
        self.owes_evaluation = control.should_evaluate
        control.should_evaluate = False
        logger.warning(
            "max_train_time=%gs is nearly over after %.1fs, and a save may take %.1fs: the run saves and stops after "
            "step %d. Resume with resume_from_checkpoint=True.",
            self.max_train_s,
            self._clock() - self._began,
            self._last_save_s(),
            state.global_step,
        )

    def _last_save_s(self) -> float:
        """Returns the seconds that the last save may take, in the background too: the loop waits for it."""
        return max(self._longest["save"], self._save_s()) or self._first_save_s

    def _saw(self, what: str, took_s: float) -> None:
        self._longest[what] = max(self._longest[what], took_s)
