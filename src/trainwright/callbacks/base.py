"""TrainerCallback: the events of a run, each a method that does nothing until somebody overrides it."""

from __future__ import annotations

from typing import Any

from trainwright.hooks import definer
from trainwright.state.control import TrainerControl
from trainwright.state.trainer_state import TrainerState

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_prediction_step",
    "on_predict",
    "on_save",
    "on_push_begin",
    "on_epoch_end",
    "on_train_end",
    "on_exception",
)


class TrainerCallback:
    """Watches a run and steers it by the flags of `control`.

    Every event gets `(args, state, control, **kwargs)`; kwargs always hold `model`, `processing_class` (also as
    `tokenizer`), `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`. A callback may change the
    flags of `control` in place; if it returns a control object, that one replaces the current one.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The trainer is made."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training starts, from the beginning or from a checkpoint."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch starts."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The micro-batches of an optimizer step are there; none is trained yet."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A micro-batch is done and another one of the same step follows."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Gradients are clipped; the weights are still the old ones."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The weights are updated; the gradients are still there."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An optimizer step is done; what the flags ask for follows."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Values are logged: `logs`, a dict."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation is done: `metrics`, a dict."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A batch of an evaluation or prediction is done."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A prediction is done: `metrics`, a dict."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint is on disk."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An upload to the Hub starts."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch is done; what the flags ask for follows."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training is over."""

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training ends with `exception`, which is raised again afterwards."""


def overrides(callback: Any, event: str) -> bool:
    """Whether somebody other than the two base classes (ours and transformers') defines this event."""
    cls = definer(callback, event)
    if cls is None:
        return event in vars(callback)
    return cls is not TrainerCallback and not _is_transformers_base(cls)


def _is_transformers_base(cls: type) -> bool:
    return cls.__name__ == "TrainerCallback" and cls.__module__.startswith("transformers.")
