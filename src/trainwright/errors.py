"""Typed errors and warnings.

Each one also derives from a built-in class, so `except ValueError` in a user's script keeps working.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class TrainwrightError(Exception):
    """Base of every error that Trainwright raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows, by IPython's protocol: the user's own, and the message."""
        return list(_format_user_lines(self))


def _format_user_lines(error: BaseException) -> Iterator[str]:
    """Yields the traceback of an error, and of those that caused it, without the lines of installed packages."""
    import sysconfig
    import traceback

    paths = sysconfig.get_paths()
    inner = tuple(f"{path}/" for path in (os.path.dirname(__file__), *(paths[one] for one in ("stdlib", "purelib"))))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(inner)]
    cause = error.__cause__
    if cause is not None:
        yield from _format_user_lines(cause)
        yield "\nThe error above caused this one:\n"
    for entry in traceback.format_list(own or frames):
        yield entry.rstrip("\n")
    for entry in traceback.format_exception_only(error):
        yield entry.rstrip("\n")


class ArgumentError(TrainwrightError, ValueError):
    """An invalid training argument, or an invalid combination of arguments.

    Attributes:
        problems: the individual problems, if the message reports several.
    """

    problems: tuple[str, ...] = ()


class RecipeError(ArgumentError):
    """A configuration file that cannot be used; the message reports each problem with its line number.

    Attributes:
        entries: the individual problems without their places, each after the path of its entry in the file.
    """

    entries: tuple[tuple[tuple[str, ...], str], ...] = ()


class GenerationConfigError(ArgumentError, OSError):
    """A generation config that cannot be found or is not valid."""


class UnknownArgumentError(ArgumentError, TypeError):
    """A name that is not a training argument."""


class ModelError(TrainwrightError, ValueError):
    """A model that cannot be trained as it was given."""


class MissingModelError(ModelError, RuntimeError):
    """Neither a model nor a `model_init` was given."""


class DataError(TrainwrightError, ValueError):
    """A dataset, a batch or a collator that does not fit."""


class CallbackError(TrainwrightError, TypeError):
    """A callback returned something other than a `TrainerControl`."""


class ExtensionError(TrainwrightError, TypeError):
    """An event of an extension returned a value of the wrong type."""


class CheckpointError(TrainwrightError, ValueError):
    """A checkpoint that cannot be read, or does not belong to this run."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint was named or expected, but does not exist."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written to disk; earlier checkpoints are untouched."""


class NonFiniteWeightsError(CheckpointError):
    """A checkpoint was not saved, or not resumed, because its weights are not finite; good ones are not overwritten."""


class BundleError(TrainwrightError, ValueError):
    """An incident bundle that is damaged, or cannot be replayed as it is."""


class BadStepError(TrainwrightError, ArithmeticError):
    """A guard ended the run because of a bad step, before its update."""


class NonFiniteError(BadStepError):
    """The loss or the gradient of a step is not finite."""


class SpikeError(BadStepError):
    """The loss or the gradient norm of a step is far above that of earlier steps."""


class MetricError(TrainwrightError, KeyError):
    """A metric was requested that no evaluation produces."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument, quotes and all
        return str(self.args[0]) if self.args else ""


class NestedCallError(TrainwrightError, RuntimeError):
    """`train()` or `evaluate()` was called from code that it is itself running."""


class StepOrderError(TrainwrightError, RuntimeError):
    """A method of a step of `Trainer.steps()` was called when it cannot be, or a step was not finished."""


class EvaluationMemoryError(TrainwrightError, RuntimeError):
    """An evaluation during training did not fit into memory, although training did."""


class SearchError(TrainwrightError, RuntimeError):
    """A hyperparameter search that ended without a single trial to choose from."""


class SearchSpaceError(ArgumentError):
    """An invalid hyperparameter search: the same mistake would end every trial."""


class MissingPackageError(TrainwrightError, ImportError):
    """An optional package is needed but not installed; the message says how to install it."""


class MissingOptimizerError(MissingPackageError, ValueError):
    """The package of the optimizer in `optim` is not installed, or too old."""


class ProcessFailedError(TrainwrightError, RuntimeError):
    """Another process of this run failed; the message has its traceback."""


class TrainwrightWarning(UserWarning):
    """Something is probably not as the user intended; training continues."""


class LegacyNameWarning(FutureWarning):
    """An older name of an argument was used; it still works, and the message names the new one."""


def warn_older_name(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warns that an older name was used, and gives the current one."""
    warnings.warn(f"{old} is the older name of {new}: write {new}.", LegacyNameWarning, stacklevel=stacklevel)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at the nearest line outside this package, at any depth of calls."""
    frame = sys._getframe(1)
    level = 2  # stack level of `frame`; this function is 1
    while frame.f_back is not None and (
        frame.f_code.co_filename == "<string>"  # a generated __init__
        or frame.f_globals.get("__name__", "").partition(".")[0] == __package__
    ):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


NEAR = 0.75  # least similarity of a suggestion, as difflib's ratio: below it, another word is meant


def nearest(name: object, known: Iterable[object]) -> str | None:
    """Returns the known name closest in spelling to an unknown one; None if none is close.

    One that differs only in case, or in blanks around it, is the closest.
    """
    texts = [str(one) for one in known]
    near = [text for text in texts if text.strip().casefold() == str(name).strip().casefold()]
    near = near or difflib.get_close_matches(str(name), texts, n=1, cutoff=NEAR)
    return near[0] if near else None


def did_you_mean(name: object, known: Iterable[object], *, quoted: bool = False) -> str:
    """Returns " Did you mean ...?" with the known name closest to an unknown one; an empty string if none is close."""
    near = nearest(name, known)
    if near is None:
        return ""
    return f" Did you mean {near!r}?" if quoted else f" Did you mean {near}?"


def excerpt(text: object, most: int = 200) -> str:
    """Returns text for a message, cut off after `most` characters."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most - 3]}..."


@contextmanager
def needs_package(message: str) -> Iterator[None]:
    """Imports an optional package inside the context.

    MissingPackageError reports why it is needed and how to install it.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(message) from error
