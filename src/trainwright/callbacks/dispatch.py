"""CallbackHandler: a table of listeners for each event, so that an event nobody listens to costs one look-up."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from trainwright.callbacks.base import EVENTS, TrainerCallback, overrides
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.state.clock import CALLBACKS, LOGGING, Clock
from trainwright.state.control import TrainerControl

logger = logging.getLogger(__name__)

# What an event means for the flags, before any callback sees it.
_CLEARS: dict[str, Any] = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}


class CallbackHandler(TrainerCallback):
    """Calls the callbacks of a trainer in the order in which they were added.

    The attributes `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`
    are what every event receives; the trainer (and others) may set them at any time.

    Attributes:
        watchers: parts of the house that hear every event before the callbacks do; not among `callbacks`.
        clock: gets the seconds that each class of callbacks takes.
    """

    def __init__(
        self, callbacks: Iterable[Any], model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any
    ) -> None:
        self.callbacks: list[Any] = []
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.args: Any = None  # the arguments that `fire` passes on
        self.watchers: list[Any] = []
        self.clock = Clock()
        self._table: dict[str, list[tuple[Any, str]]] = {}  # what to call, and the phase it is timed under
        for callback in callbacks:
            self.add_callback(callback)
        if not any(_is_flow(callback) for callback in self.callbacks):
            logger.warning(
                "There is no DefaultFlowCallback among the callbacks, so nothing logs, evaluates, saves or stops by "
                "the arguments. Add one: trainer.add_callback(DefaultFlowCallback). Present: %s.",
                self.callback_list.replace("\n", ", "),
            )

    def add_callback(self, callback: Any) -> None:
        """Appends a callback, given as an instance or as a class to make one of."""
        instance = callback() if isinstance(callback, type) else callback
        if type(instance) in [type(other) for other in self.callbacks]:
            logger.warning(
                "A %s is among the callbacks already; now there are two. Present: %s.",
                type(instance).__name__, self.callback_list.replace("\n", ", "),
            )  # fmt: skip
        self.callbacks.append(instance)
        self.rebuild()

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns a callback, named by instance or by class (the first of that class); else None."""
        for candidate in self.callbacks:
            if isinstance(candidate, callback) if isinstance(callback, type) else candidate == callback:
                self.callbacks.remove(candidate)
                self.rebuild()
                return candidate
        return None

    def remove_callback(self, callback: Any) -> None:
        """As `pop_callback`, but an instance that is not there raises ValueError."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks: {self.callback_list or 'none'}.")

    def listeners(self, event: str) -> list[Any]:
        """The methods of callbacks that an event calls."""
        return [listener for listener, phase in self._table[event] if phase.startswith(CALLBACKS)]

    @property
    def callback_list(self) -> str:
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def rebuild(self) -> None:
        """Makes the table again; needed after `callbacks` was changed other than through the methods."""
        heard = [(c, LOGGING) for c in self.watchers]
        heard += [(c, f"{CALLBACKS}.{type(c).__name__}") for c in self.callbacks]
        self._table = {e: [(getattr(c, e), phase) for c, phase in heard if overrides(c, e)] for e in EVENTS}

    def watch(self, watcher: Any) -> None:
        """Tells a part of the house every event that it has a method for, before the callbacks."""
        self.watchers.append(watcher)
        self.rebuild()

    def looks_at_saves(self) -> bool:
        """Whether a callback may look at the files of a checkpoint when it is told of one; watchers never do.

        A callback that does not says so by an attribute `looks_at_files = False`.
        """
        return any(overrides(c, "on_save") and getattr(c, "looks_at_files", True) for c in self.callbacks)

    def fire(self, event: str, run: Any, **kwargs: Any) -> None:
        """Tells the listeners; a control object that one of them returns becomes the run's."""
        for flag in _CLEARS.get(event, ()):
            setattr(run.control, flag, False)
        if "call_event" in self.__dict__:  # somebody tells the callbacks himself, as SetFit does
            self._tell(event, self.args, run.state, run.control, kwargs, watchers_only=True)
            run.control = self.call_event(event, self.args, run.state, run.control, **kwargs)
        elif self._table[event]:
            run.control = self._tell(event, self.args, run.state, run.control, kwargs)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Tells the listeners of an event and returns the control object that came out."""
        for flag in _CLEARS.get(event, ()):
            setattr(control, flag, False)
        return self._tell(event, args, state, control, kwargs)

    def _tell(
        self, event: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any], *, watchers_only: bool = False
    ) -> TrainerControl:
        for listener, phase in self._table[event]:
            if watchers_only and phase != LOGGING:
                continue
            before = self.clock.mark(phase)
            result = listener(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                tokenizer=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            self.clock.mark(before)
            if result is not None:
                control = result
        return control  # type: ignore[no-any-return]


def _is_flow(callback: Any) -> bool:
    return isinstance(callback, DefaultFlowCallback) or type(callback).__name__ == "DefaultFlowCallback"


def _forward(event: str, extra: str | None) -> Any:
    """The handler's own method for an event, as code that drives callbacks by hand calls it."""

    def method(self: CallbackHandler, args: Any, state: Any, control: Any, *values: Any, **kwargs: Any) -> Any:
        if values and extra is not None:
            kwargs[extra] = values[0]
        return self.call_event(event, args, state, control, **kwargs)

    method.__name__ = event
    return method


for _event in EVENTS:
    _extra = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}.get(_event)
    setattr(CallbackHandler, _event, _forward(_event, _extra))
