"""Exit codes and error messages of commands.

0    done
1    it failed while it worked, or a checkpoint is damaged, or a check found an error
2    usage, configuration or data: nothing was trained
130  SIGINT (Ctrl-C); 143 SIGTERM, 138 SIGUSR1: the last finished step is saved, `trainwright resume` goes on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from trainwright import errors
from trainwright.distributed.world import World
from trainwright.log_handler import for_log

FAILED = 1
USAGE = 2
OF_THE_USER = (
    errors.ArgumentError, errors.CheckpointNotFoundError, errors.DataError, errors.MetricError,
    errors.MissingPackageError, errors.ModelError, errors.NotYetError,
)  # fmt: skip


@contextmanager
def reporting() -> Iterator[None]:
    """Turns the library's errors into their message and an exit code; any other error is a traceback."""
    try:
        yield
    except OF_THE_USER as error:
        tell(str(error))
        raise typer.Exit(USAGE) from None
    except (errors.TrainwrightError, OSError) as error:
        tell(str(error))
        raise typer.Exit(FAILED) from None


def echo(text: str, *, err: bool = False) -> None:
    """Prints text, without the control characters and the keys of others that may be in it; with `err` to stderr."""
    typer.echo(for_log(text), err=err)


def tell(problem: str) -> None:
    """Prints a problem, once where several processes find the same."""
    if World.detect().process_index == 0:
        echo(problem, err=True)


def say(word: str, line: str) -> None:
    """Prints a line in the style of the plan that a run shows when it starts."""
    if World.detect().process_index == 0:
        echo(f"{word:<10}{line}")
