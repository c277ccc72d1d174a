"""CallbackHandler: a table of listeners for each event, so an event without listeners costs one look-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias, cast

from trainwright.callbacks.base import EVENTS, TrainerCallback, overrides
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.errors import CallbackError
from trainwright.state.progress import CALLBACKS, LOGGING, Clock, Progress
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.counterparts import is_counterpart

logger = logging.getLogger(__name__)

Callback: TypeAlias = Any  # an instance of our TrainerCallback, of transformers', or of a class that only looks alike
Given: TypeAlias = Callback | type[Callback]  # an instance, or a class to instantiate
Listener: TypeAlias = Callable[..., TrainerControl | None]
Heard: TypeAlias = list[tuple[Listener, str]]  # listeners of an event, and the phase that each is timed under

# Flags that an event clears, before any callback sees it.
_CLEARS: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}
OWN_EVENTS = frozenset({"on_exception", "on_incident"})  # that the original Trainer does not have


def is_own_callback(callback: Callback) -> bool:
    """Returns True for a callback of this package: the time that it takes is the trainer's, not the user's."""
    return type(callback).__module__.partition(".")[0] == __name__.partition(".")[0]


class CallbackHandler(TrainerCallback, original="transformers.trainer_callback"):
    """Calls the callbacks of a trainer in the order in which they were added.

    Every event receives the attributes `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader` and
    `eval_dataloader`; the trainer (and others) may set them at any time.

    Args:
        callbacks: instances, or classes to instantiate, of our TrainerCallback or transformers'.

    Attributes:
        watchers: internal listeners, called before the callbacks at every event; not among `callbacks`.
        clock: gets the seconds that each class of callbacks takes.
    """

    def __init__(
        self,
        callbacks: Iterable[Given],
        model: object,
        processing_class: object,
        optimizer: object,
        lr_scheduler: object,
    ) -> None:
        self.callbacks: list[Callback] = []
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: object = None
        self.eval_dataloader: object = None
        self.args: object = None  # the arguments that `fire` passes on
        self.watchers: list[Callback] = []
        self.clock = Clock()
        # Set by a run with `auto_find_batch_size`: frees memory after an error of a listener of an event, and returns
        # True if the listener is to be called once more.
        self.makes_room: Callable[[str, RuntimeError], bool] | None = None
        self._table: dict[str, Heard] = {}  # watchers, then callbacks
        self._watching: dict[str, Heard] = {}  # the watchers alone
        self._is_replaced = False  # whether `call_event` is a subclass's or a library's
        for callback in callbacks:
            self._append(callback)
        self.rebuild()
        is_ours = any(isinstance(callback, DefaultFlowCallback) for callback in self.callbacks)
        if not is_ours and "DefaultFlowCallback" not in self.callback_list.split():  # transformers' has the name too
            logger.warning(
                "There is no DefaultFlowCallback among the callbacks, so nothing logs, evaluates, saves or stops by "
                "the arguments. Add one: trainer.add_callback(DefaultFlowCallback). Present: %s.",
                self.callback_list.replace("\n", ", "),
            )

    def add_callback(self, callback: Given) -> None:
        """Appends a callback.

        Args:
            callback: an instance, or a class to instantiate.
        """
        self._append(callback)
        self.rebuild()

    def _append(self, callback: Given) -> None:
        instance = callback() if isinstance(callback, type) else callback
        if type(instance) in [type(other) for other in self.callbacks]:
            logger.warning(
                "A %s is among the callbacks already; now there are two. Present: %s.",
                type(instance).__name__,
                self.callback_list.replace("\n", ", "),
            )
        self.callbacks.append(instance)

    def pop_callback(self, callback: Given) -> Callback | None:
        """Removes a callback and returns it.

        Args:
            callback: the instance, or a class for the first callback of that class.

        Returns:
            The removed callback; None if there is none.
        """
        for candidate in self.callbacks:
            if _is_meant(candidate, callback):
                self.callbacks.remove(candidate)
                self.rebuild()
                return candidate
        return None

    def remove_callback(self, callback: Given) -> None:
        """Removes a callback.

        Args:
            callback: as for `pop_callback`.

        Raises:
            ValueError: the instance is not among the callbacks; a class that is not there is ignored.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks: {self.callback_list or 'none'}.")

    @property
    def callback_list(self) -> str:
        """Class names of the callbacks, one a line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def rebuild(self) -> None:
        """Builds the table of listeners; needed after `callbacks` was changed other than through the methods."""
        watchers = [(c, LOGGING) for c in self.watchers]
        callbacks = [(c, LOGGING if is_own_callback(c) else f"{CALLBACKS}.{type(c).__name__}") for c in self.callbacks]
        self._watching = _listeners(watchers)
        self._table = _listeners([*watchers, *callbacks])
        self._is_replaced = getattr(self.call_event, "__func__", None) is not _CALL_EVENT

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "call_event":  # SetFit puts its own on the instance
            self.rebuild()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "call_event":
            self.rebuild()

    def watch(self, watcher: Callback) -> None:
        """Adds an internal listener, called before the callbacks at each event that it overrides.

        Args:
            watcher: object with methods named after events.
        """
        self.watchers.append(watcher)
        self.rebuild()

    def looks_at_saves(self) -> bool:
        """Returns True if a callback may read a checkpoint in `on_save`: unless it says `looks_at_files = False`."""
        return any(overrides(c, "on_save") and getattr(c, "looks_at_files", True) for c in self.callbacks)

    def fire(self, event: str, progress: Progress, **kwargs: object) -> None:
        """Calls the listeners of an event; a control object returned by a listener becomes the run's.

        A `call_event` of a subclass or a library calls the callbacks, and only watchers are called here. Events that
        the original Trainer does not have are not passed to it, as it may call callbacks that lack the method.

        Args:
            event: one of `EVENTS`.
            progress: holds `state` and `control`.
            **kwargs: objects of this event, such as `logs`.
        """
        for flag in _CLEARS.get(event, ()):
            setattr(progress.control, flag, False)
        listeners = self._table[event]
        if self._is_replaced and event not in OWN_EVENTS:
            self._tell(event, self._watching[event], self.args, progress.state, progress.control, kwargs)
            progress.control = self.call_event(event, self.args, progress.state, progress.control, **kwargs)
        elif listeners:
            progress.control = self._tell(event, listeners, self.args, progress.state, progress.control, kwargs)

    def call_event(
        self, event: str, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Calls the callbacks, not the watchers, and returns the resulting control object.

        Args:
            event: one of `EVENTS`.
            args: arguments of the run.
            state: record of the run.
            control: flags before the event.
            **kwargs: objects of this event, such as `logs`.
        """
        for flag in _CLEARS.get(event, ()):
            setattr(control, flag, False)
        callbacks = self._table[event][len(self._watching[event]) :]
        return self._tell(event, callbacks, args, state, control, kwargs)

    def _tell(
        self,
        event: str,
        heard: Heard,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        kwargs: dict[str, object],
    ) -> TrainerControl:
        for listener, phase in heard:
            before = self.clock.mark(phase)
            is_stopping = control.should_training_stop
            given = {
                "model": self.model,
                "processing_class": self.processing_class,
                "tokenizer": self.processing_class,
                "optimizer": self.optimizer,
                "lr_scheduler": self.lr_scheduler,
                "train_dataloader": self.train_dataloader,
                "eval_dataloader": self.eval_dataloader,
                **kwargs,
            }
            try:
                result = listener(args, state, control, **given)
            except RuntimeError as error:
                if self.makes_room is None or not self.makes_room(event, error):
                    raise
                result = listener(args, state, control, **given)  # once more, after memory was freed
            self.clock.mark(before)
            if result is not None:
                control = result if isinstance(result, TrainerControl) else _read_result(result, control, listener)
            if phase != LOGGING and control.should_training_stop and not is_stopping:  # ours say so themselves, and why
                _say_who_stops(listener, state)
        return control


_CALL_EVENT = CallbackHandler.call_event


def _is_meant(candidate: Callback, given: Given) -> bool:
    """Returns True if a callback is the given one, or of the given class: ours, or the original's of that name."""
    if isinstance(given, type):
        return isinstance(candidate, given) or is_counterpart(given, candidate)
    return bool(candidate == given)


def _listeners(callbacks: Iterable[tuple[Callback, str]]) -> dict[str, Heard]:
    """Returns the methods that callbacks override, by event, each with the phase that it is timed under."""
    callbacks = list(callbacks)
    return {e: [(getattr(c, e), phase) for c, phase in callbacks if overrides(c, e)] for e in EVENTS}


def _say_who_stops(listener: Listener, state: TrainerState) -> None:
    if state.is_world_process_zero and state.global_step < state.max_steps:
        who = type(getattr(listener, "__self__", listener)).__name__
        logger.warning("%s ends training after step %d of %d.", who, state.global_step, state.max_steps)


def _read_result(result: object, control: TrainerControl, listener: Listener) -> TrainerControl:
    """Converts a callback's return value that is not our control: another library's control, or a dict of flags."""
    flags = [field.name for field in fields(TrainerControl)]
    if all(hasattr(result, flag) for flag in flags):
        return cast(TrainerControl, result)
    if isinstance(result, Mapping) and result.keys() <= set(flags):
        for flag, value in result.items():
            setattr(control, flag, bool(value))
        return control
    raise CallbackError(
        f"{getattr(listener, '__qualname__', listener)} returned {result!r}. An event of a callback returns None, "
        f"`control`, or a dict of its flags: {', '.join(flags)}."
    )


def _forward(event: str, extra: str | None) -> Listener:
    """Returns the handler's own method for an event, for code that calls events directly."""

    def method(
        self: CallbackHandler, args: object, state: TrainerState, control: TrainerControl, *values: object, **kw: object
    ) -> TrainerControl:
        if values and extra is not None:
            kw[extra] = values[0]
        self._tell(event, self._watching[event], args, state, control, kw)
        return self.call_event(event, args, state, control, **kw)

    method.__name__ = event
    return method


for _event in EVENTS:
    _extra = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}.get(_event)
    setattr(CallbackHandler, _event, _forward(_event, _extra))
