"""TrainerCallback: the events of a run, each a method without effect until a subclass overrides it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.counterparts import Counterpart, is_counterpart
from trainwright.support.hooks import definer

# An override annotates the arguments and the extra objects with the types that it uses: ours, transformers' or narrower
# ones. Types of parameters are contravariant, so only Any lets a type checker accept all of them.
Args: TypeAlias = Any
Flags: TypeAlias = "TrainerControl | None"  # a control object that replaces the current one; None keeps it

Logs: TypeAlias = Mapping[str, Any]  # name -> number, text, or whatever the user logs
NO_LOGS: Logs = MappingProxyType({})


class TiedToProcess:
    """Mark of callbacks of ours that another process makes anew from their class: they have threads or clients."""

    __slots__ = ()


class TrainerCallback(Counterpart, original="transformers.trainer_callback"):
    """Base of callbacks: watches a run and steers it by the flags of `control`.

    Every event gets `args`, the `TrainingArguments` of the run; `state`, its record: step, epoch, history; `control`,
    with flags that it may change in place; and by name `model`, `processing_class` (also as `tokenizer`), `optimizer`,
    `lr_scheduler`, `train_dataloader`, `eval_dataloader`, and the objects that the event has of its own. An override
    has the needed ones as parameters. It returns a control object that replaces the current one, or None.

    Example:
        class StopAtLoss(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                control.should_training_stop |= logs.get("loss", 1.0) < 0.1
    """

    def on_init_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs at the end of the trainer's constructor."""

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs before the first step, after a checkpoint is loaded."""

    def on_epoch_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs at the start of an epoch."""

    def on_step_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs when the micro-batches of an optimizer step are read, before the first forward."""

    def on_substep_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after each micro-batch of an optimizer step but the last."""

    def on_pre_optimizer_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after gradient clipping, before the optimizer step."""

    def on_optimizer_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after the optimizer step, before the gradients are cleared."""

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after an optimizer step, before the logs, evaluations and saves that the flags ask for."""

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs at each log; `kwargs` has `logs`, a dict of name to value, which a callback may change."""

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after an evaluation; `kwargs` has `metrics`, a dict of name to value, with the prefix `eval_`."""

    def on_prediction_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after each batch of an evaluation or prediction."""

    def on_predict(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after a prediction; `kwargs` has `metrics`, a dict of name to value, with the prefix `test_`."""

    def on_save(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after a checkpoint is on disk."""

    def on_push_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs before an upload to the Hub."""

    def on_epoch_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs after an epoch, before the logs, evaluations and saves that the flags ask for."""

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs at the end of training."""

    def on_exception(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs when training ends with an error, `exception` in `kwargs`, which is raised again afterwards."""

    def on_incident(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Args) -> Flags:
        """Runs when a guard finds a bad step: its loss or gradient is not finite.

        On a GPU a fused optimizer has skipped the update by itself, and the event comes one step later, or at the
        next log, evaluation or save. An error in the callback ends training.

        Args:
            args: as for every event; see the class.
            state: as for every event.
            control: as for every event.
            **kwargs: `incident`, with `kind`, `step`, `action`, `values` and `text`; and the objects of every event.

        Returns:
            A control object that replaces the current one, or None.
        """


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def overrides(callback: object, event: str) -> bool:
    """Returns True if the instance, or a class other than the base classes (ours, transformers'), defines an event."""
    if event in vars(callback):
        return True
    if getattr(type(callback), event, None) is vars(TrainerCallback)[event]:  # most events of most callbacks
        return False
    cls = definer(callback, event)
    if cls is None:
        return False
    is_transformers_base = cls.__name__ == "TrainerCallback" and cls.__module__.startswith("transformers.")
    return cls is not TrainerCallback and not is_transformers_base and not is_counterpart(cls, callback)
