"""Typed errors and warnings. Each is also a built-in one, so `except ValueError` in a user's script keeps working."""

from __future__ import annotations

import difflib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class TrainwrightError(Exception):
    """Base of every error that Trainwright raises on purpose."""


class ArgumentError(TrainwrightError, ValueError):
    """A training argument, or a combination of them, that cannot do what was asked.

    Attributes:
        problems: each of them alone, where the message tells several.
    """

    problems: tuple[str, ...] = ()


class RecipeError(ArgumentError):
    """A configuration file that cannot be carried out; the message tells each problem with its line."""


class GenerationConfigError(ArgumentError, OSError):
    """A generation config that cannot be found, or that is not valid."""


class UnknownArgumentError(ArgumentError, TypeError):
    """A name that no training argument has."""


class ModelError(TrainwrightError, ValueError):
    """A model that cannot be trained as it was given."""


class MissingModelError(ModelError, RuntimeError):
    """Neither a model nor a function that makes one was given."""


class DataError(TrainwrightError, ValueError):
    """A dataset, a batch or a collator that does not fit."""


class CallbackError(TrainwrightError, TypeError):
    """A callback that returned what is no control of the run."""


class ExtensionError(TrainwrightError, TypeError):
    """An extension whose event returned a value of another kind than it must."""


class CheckpointError(TrainwrightError, ValueError):
    """A checkpoint that cannot be read, or does not belong to this run."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was named or expected."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint that could not be brought to the disk; those before it are untouched."""


class NonFiniteWeightsError(CheckpointError):
    """A checkpoint whose weights are not finite, and which is therefore not written over a good one."""


class BundleError(TrainwrightError, ValueError):
    """An incident bundle that is damaged, or cannot be replayed as it is."""


class BadStepError(TrainwrightError, ArithmeticError):
    """A guard ended the run because of a bad step, before its update."""


class NonFiniteError(BadStepError):
    """The loss or the gradient of a step is not finite."""


class SpikeError(BadStepError):
    """The loss or the norm of the gradient of a step is far above those before it."""


class MetricError(TrainwrightError, KeyError):
    """A metric that was named but that no evaluation produces."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument, quotes and all
        return str(self.args[0]) if self.args else ""


class NestedCallError(TrainwrightError, RuntimeError):
    """`train()` or `evaluate()` was called from inside of what it calls itself."""


class StepOrderError(TrainwrightError, RuntimeError):
    """A method of a step of `Trainer.steps()` was called when it cannot be, or a step was not finished."""


class EvaluationMemoryError(TrainwrightError, RuntimeError):
    """An evaluation in the middle of training did not fit into memory; the training itself did."""


class SearchError(TrainwrightError, RuntimeError):
    """A hyperparameter search that ended without a single trial to choose from."""


class SearchSpaceError(ArgumentError):
    """A search that cannot work as it was asked for: the same mistake would end each of its trials."""


class MissingPackageError(TrainwrightError, ImportError):
    """An optional package is needed and not installed; the message says what to install."""


class ProcessFailedError(TrainwrightError, RuntimeError):
    """Another process of this run failed; the message has its traceback."""


class TrainwrightWarning(UserWarning):
    """Something is probably not what the user meant; training continues."""


class LegacyNameWarning(FutureWarning):
    """An older name of an argument was used; it still works, and the message names the new one."""


def add_note(error: BaseException, text: str) -> None:
    """Adds a sentence to an error of any type, below its traceback; Python 3.10, which shows no notes, logs it."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
        logger.error("%s", text)


def warn_older_name(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warns that an older name was used, and which is written today."""
    warnings.warn(f"{old} is the older name of {new}: write {new}.", LegacyNameWarning, stacklevel=stacklevel)


NEAR = 0.75  # least similarity of a suggestion, as difflib's ratio: below it, another word is meant


def nearest(name: object, known: Iterable[object]) -> str | None:
    """Returns the known name that is spelled most like an unknown one; None if none is near."""
    near = difflib.get_close_matches(str(name), [str(one) for one in known], n=1, cutoff=NEAR)
    return near[0] if near else None


def did_you_mean(name: object, known: Iterable[object], *, quoted: bool = False) -> str:
    """Returns " Did you mean ...?" with the known name that is nearest to an unknown one; empty where none is near."""
    near = nearest(name, known)
    if near is None:
        return ""
    return f" Did you mean {near!r}?" if quoted else f" Did you mean {near}?"


def excerpt(text: object, most: int = 200) -> str:
    """Returns a text for a message, cut off after so many characters."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most - 3]}..."


@contextmanager
def needs_package(message: str) -> Iterator[None]:
    """Imports an optional package within the context; a MissingPackageError says what needs it, and what to install."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(message) from error
