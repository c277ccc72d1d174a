"""A refused construction, or a training refused before step 1, leaves the process unchanged.

Everything already set is restored, including random states, which construction seeds.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from trainwright.checkpoint import rng
from trainwright.config.fields import SETTINGS
from trainwright.distributed.device import is_in_use, tf32_switches
from trainwright.errors import UnknownArgumentError
from trainwright.run.internals import Internals
from trainwright.state.interrupts import SIGNALS, is_main_thread

# Any: states of accelerate hold objects of many types; an unfinished constructor leaves attributes missing.

P = ParamSpec("P")
T = TypeVar("T")

LOGGERS = (None, "trainwright", "transformers", "accelerate")


def with_known_keywords(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Decorates a constructor: for an unknown keyword, UnknownArgumentError (a TypeError) suggests the known one."""
    parameters = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        unknown = [name for name in kwargs if name not in parameters]
        if unknown:
            from trainwright.config.vocabulary import hint_for_keyword  # a table that only a mistake needs

            hints = {name: hint_for_keyword(name, parameters, SETTINGS) for name in unknown}
            raise UnknownArgumentError(
                "\n".join(f"{name} is not an argument of Trainer.{hint}" for name, hint in hints.items())
            )
        init(self, *args, **kwargs)

    return checked


@contextmanager
def unchanged_if_refused(trainer: Any) -> Iterator[None]:
    """Wraps the construction of a trainer: if it raises, the process is as before."""
    before = ProcessSettings()
    try:
        yield
    except BaseException:
        internals = Internals(trainer)
        if internals.has_services:
            internals.services.memory_tracker.abandon()
        before.put_back()
        raise


@contextmanager
def unchanged_before_training(run: Any) -> Iterator[None]:
    """Wraps a training: if it raises before its run `has_begun`, the process is as before."""
    before = ProcessSettings()
    try:
        yield
    except BaseException:
        if not run.has_begun:
            before.put_back()
        raise


class ProcessSettings:
    """The current values of everything in the process that a trainer's constructor or the start of training may set."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._loggers = [(logger, logger.level, list(logger.handlers)) for logger in map(logging.getLogger, LOGGERS)]
        self._dtype = torch.get_default_dtype()
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._precision = _precision()
        self._states = None if torch.distributed.is_available() and torch.distributed.is_initialized() else _states()
        self._random_states = _random_states()
        self._signals = {number: signal.getsignal(number) for number in SIGNALS} if is_main_thread() else {}

    def put_back(self) -> None:
        """Restores the values that differ."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        for logger, level, handlers in self._loggers:
            if logger.level != level:
                logger.setLevel(level)
            logger.handlers[:] = handlers
        torch.set_default_dtype(self._dtype)
        torch.use_deterministic_algorithms(self._is_deterministic, warn_only=self._warns_only)
        for (owner, name), value in self._precision.items():
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        if self._states is not None and not torch.distributed.is_initialized():
            _put_states_back(self._states)
        rng.restore(self._random_states)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _precision() -> dict[tuple[Any, str], bool]:
    """Switches of CUDA's libraries; empty if torch's newer switches are in use, since the old ones then raise."""
    cudnn = torch.backends.cudnn
    switches = [(cudnn, "deterministic"), (cudnn, "benchmark"), *tf32_switches()]
    found: dict[tuple[Any, str], bool] = {}
    for owner, name in switches:
        with suppress(RuntimeError):
            found[owner, name] = getattr(owner, name)
    return found


def _random_states() -> rng.States:
    """Random states of this process; without the accelerator's until it is in use, since reading would start it."""
    if not is_in_use():
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "cpu": torch.get_rng_state(),
        }
    return rng.capture()


def _find_shared_states() -> list[Any]:
    """Returns accelerate's classes with a dictionary shared by all instances."""
    state = sys.modules.get("accelerate.state")  # imported by the engine
    if state is None:
        return []
    return [state.PartialState, state.AcceleratorState, state.GradientState]  # ordered by dependency


def _states() -> list[dict[str, Any]]:
    return [dict(vars(kind())) if _is_initialized(kind) else {} for kind in _find_shared_states()]


def _put_states_back(before: list[dict[str, Any]]) -> None:
    """Restores the entries of each state; a state that did not exist becomes empty again."""
    kinds = _find_shared_states()
    found = [vars(kind()) if _is_initialized(kind) else None for kind in kinds]
    for state, values in zip(found, before or [{} for _ in kinds], strict=True):
        if state is not None and state != values:
            state.clear()
            state.update(values)


def _is_initialized(kind: Any) -> bool:
    """Returns True if a state exists, without creating it, as an instance of accelerate's classes would."""
    if kind.__name__ == "AcceleratorState":
        return bool(sys.modules["accelerate.state"].is_initialized())
    return bool(kind.initialized.fget(kind))  # the property reads the dictionary that all instances share
