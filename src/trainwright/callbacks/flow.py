"""DefaultFlowCallback: sets the flags to log, evaluate, save and stop, from the arguments."""

from __future__ import annotations

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.state.control import TrainerControl
from trainwright.state.trainer_state import TrainerState


def _is_due(step: int, interval: float | None) -> bool:
    return bool(interval) and step % interval == 0  # transformers counts with negative intervals too


class DefaultFlowCallback(TrainerCallback):
    """The usual rhythm of a run: by steps, by epochs, or not at all, for each of log, evaluate and save.

    At the last step a run that evaluates or saves by steps does so once more, so that nothing trained is lost.
    """

    def on_step_end(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        step = state.global_step
        is_last = step >= state.max_steps
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and _is_due(step, state.logging_steps)
        ):
            control.should_log = True
        if (
            args.eval_strategy == "steps"
            and (args.eval_delay or 0) <= step
            and (is_last or _is_due(step, state.eval_steps))
        ):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (is_last or _is_due(step, max(state.save_steps or 0, 0))):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and (args.eval_delay or 0) <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control
