"""What the commands of `trainwright` share: answers, JSON, errors as exit codes, types of parameters.

Capabilities have commands too (`commands` in their row), which the program in `cli/main.py` finds in the table.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeAlias

import typer

from trainwright import errors
from trainwright._types import is_url, json_value
from trainwright.distributed.world import World
from trainwright.support.door import parse_number
from trainwright.support.log_handler import PLAN_INDENT, fold_line, for_log

FAILED = 1
USAGE = 2
_ANSWERS: ContextVar[TextIO | None] = ContextVar("trainwright_answers", default=None)  # None: sys.stdout
OF_THE_USER = (
    errors.ArgumentError,
    errors.CheckpointNotFoundError,
    errors.DataError,
    errors.MetricError,
    errors.MissingPackageError,
    errors.ModelError,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def reporting(*, as_json: bool = False) -> Iterator[None]:
    """Turns the library's errors into their message and an exit code; any other error is a traceback.

    With `as_json` the error is an object on standard output too: {"error": {"type", "message", "problems"}}.
    """
    try:
        yield
    except OF_THE_USER as error:
        _report(error, as_json=as_json)
        raise typer.Exit(USAGE) from None
    except BrokenPipeError:
        # Nobody reads on: typer ends the program without a word.
        raise
    except (errors.TrainwrightError, OSError) as error:
        _report(error, as_json=as_json)
        raise typer.Exit(FAILED) from None


def _report(error: Exception, *, as_json: bool) -> None:
    warn_user(str(error))
    if as_json and World.detect().process_index == 0:
        problems = [*getattr(error, "problems", ())] or [str(error)]
        print_json({"error": {"type": type(error).__name__, "message": str(error), "problems": problems}})


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a command: its errors are reported, as JSON if it was called with `--json`."""

    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        with answers_alone() if as_json else nullcontext(), reporting(as_json=as_json):
            command(*args, **kwargs)

    return call


@contextmanager
def answers_alone() -> Iterator[None]:
    """Within the context, standard output has answers alone; other lines, of libraries too, go to standard error."""
    token = _ANSWERS.set(_ANSWERS.get() or sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _ANSWERS.reset(token)


@contextmanager
def answering(as_json: bool) -> Iterator[dict[str, Any]]:
    """Within the context, a command fills the dict that `--json` prints."""
    answer: dict[str, Any] = {}
    try:
        yield answer
    finally:
        if as_json and answer and World.detect().process_index == 0:
            print_json(answer)


def print_text(text: str, *, ends: bool = True) -> None:
    """Prints an answer as it is, at once; without the end of its line if it does not end."""
    typer.echo(text, file=_ANSWERS.get(), nl=ends)


def print_json(value: object) -> None:
    """Prints an answer in JSON, without keys that may be in it."""
    print_text(for_log(json_text(value)))


def print_line(text: str, *, err: bool = False, ends: bool = True) -> None:
    """Prints text, without the control characters and the keys of others that may be in it; with `err` to stderr."""
    typer.echo(for_log(text), err=err, nl=ends)


def warn_user(problem: str) -> None:
    """Prints a problem, once where several processes find the same."""
    if World.detect().process_index == 0:
        print_line(problem, err=True)


def json_text(value: object) -> str:
    """Returns a value as JSON, indented."""
    return json.dumps(json_value(value), indent=2, ensure_ascii=False)


def print_status(word: str, line: str) -> None:
    """Prints a line in the style of the plan that a run shows when it starts."""
    if World.detect().process_index == 0:
        print_line(fold_line(f"{word:<{PLAN_INDENT}}{line}"))


def amount(text: str) -> float:
    """Returns a finite number from 0 on; an error of the command line for others, such as `nan`."""
    try:
        return parse_number(float(text), least=0)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


# What `place` returns, in signatures of commands: help shows "path".
if TYPE_CHECKING:
    AnyPlace: TypeAlias = Any
else:
    AnyPlace = Path


def place(text: str) -> Path | str:
    """Returns a path, or a URL as it is."""
    return text if is_url(text) else Path(text)


def named_as(asked: Path | str, local: Path, text: str) -> str:
    """Returns a text with the path of a copy without the directory in which the copy is."""
    return text.removeprefix(f"{local.parent}/") if is_url(asked) else text
