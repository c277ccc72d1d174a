"""Handler on the package's logger: cleans every record for other handlers, and shows records that have no other.

It is a handler since Python applies the filters of a logger only to records made on that very logger, and each module
has its own; the handlers of `trainwright` are called before the handlers of the root logger.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

from trainwright._types import printable, without_tokens

# Characters of the column with the first word of a line of the plan.
PLAN_INDENT = 10
# Characters of a terminal below which lines are not folded further.
NARROWEST = 40


class PackageHandler(logging.StreamHandler):  # type: ignore[type-arg]  # of the stream of the moment
    """Shows messages on stderr while the script has not configured logging; Python itself drops level info.

    Those from level warning on begin with the level and the package's name. A warning is shown by the first process,
    and within a run once.
    """

    said: ClassVar[list[set[str]]] = []  # warnings of each run under way, the latest run last; none between runs

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line or lines of a record."""
        start = f"{record.levelname} {__name__.partition('.')[0]}: " if record.levelno >= logging.WARNING else ""
        return start + super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Cleans a record; shows it if the root logger has no handler."""
        _clean(record)
        if not logging.getLogger().handlers and not self._is_repeated(record):
            self.stream = sys.stderr  # without a flush of the one before, which may be closed: a notebook's, a test's
            with above_bars():
                super().emit(record)

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        """Returns whether a warning was already shown in this run, or is shown by the first process for all."""
        if record.levelno != logging.WARNING:
            return False
        if os.environ.get("RANK", "0") != "0" and not logging.getLogger(record.name).isEnabledFor(logging.INFO):
            return True  # log_level_replica="info" shows the messages of every process
        if not self.said:
            return False
        known = self.said[-1]
        text = record.getMessage()
        is_known = text in known
        known.add(text)
        return is_known


def above_bars() -> AbstractContextManager[object]:
    """Context in which the bars of tqdm on a terminal are taken away, and drawn again below the new text."""
    module = sys.modules.get("tqdm")  # not imported: there is no bar
    if module is None or not sys.stderr.isatty():
        return nullcontext()
    bars: AbstractContextManager[object] = module.tqdm.external_write_mode(file=sys.stderr)
    return bars


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Within the context a warning with the same text is shown once. Contexts may end in any order."""
    known: set[str] = set()
    PackageHandler.said.append(known)
    try:
        yield
    finally:
        PackageHandler.said[:] = [one for one in PackageHandler.said if one is not known]


def _clean(record: logging.LogRecord) -> None:
    """Masks keys and escapes control characters in the message of a record and in its traceback."""
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit the format: each handler reports it
        return
    if (shown := for_log(text)) != text:
        record.msg = shown
        record.args = None
    if record.exc_info and not record.exc_text:
        record.exc_text = for_log(logging.Formatter().formatException(record.exc_info))


def for_log(text: str) -> str:
    """Returns text of several lines without control characters, likely keys, and numbers of system errors."""
    return without_tokens(printable(re.sub(r"\[Errno -?\d+\] ", "", text), lines=True))


def fold_line(line: str) -> str:
    """Returns a line of the plan for standard output: on a terminal in its width, below the first word's column.

    In a pipe and in a file a line stays one line.
    """
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(
        line,
        max(NARROWEST, shutil.get_terminal_size().columns),
        subsequent_indent=" " * PLAN_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def install() -> None:
    """Adds the handler to the package's logger; called when the package is imported."""
    logger = logging.getLogger(__name__.partition(".")[0])
    if not any(type(handler).__name__ == PackageHandler.__name__ for handler in logger.handlers):  # imported again
        logger.addHandler(PackageHandler())
