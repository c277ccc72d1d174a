"""Runs cells: each in a process of its own, with a limit of its own; its line is written when it is done.

While one cell measures, the process of the next one imports its libraries and waits, so that the device does not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Found = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A measurement by its name, and the seconds after which it is ended."""

    name: str
    limit_s: float


class CellProcess:
    """Measures one cell when `measured` is called.

    Args:
        command: starts a process that imports what it needs, waits for a line on its standard input, and writes what it
            found as JSON into the file that is appended to the command.
        errors: gets what the process prints.
    """

    def __init__(self, cell: Cell, command: Sequence[str], errors: IO[str]) -> None:
        self.cell = cell
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name) / "found.json"
        self._process = subprocess.Popen(
            [*command, cell.name, str(self._result)],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def measured(self, limit_s: float) -> Found:
        """Lets it begin and returns what it found, or the reason why there is nothing, under "failed"."""
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write("begin\n")
            self._process.stdin.flush()
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {limit_s:.0f} s"}
        finally:
            self.end()
        if self._result.is_file():
            found: Found = json.loads(self._result.read_text())
            return found
        return {"failed": f"the process ended with {code}"}

    def end(self) -> None:
        """Ends it with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        self.end()
        self._folder.cleanup()


def run_cells(cells: Sequence[Cell], command: Sequence[str], folder: Path, minutes: float) -> int:
    """Measures one cell after the other; one that fails, hangs or comes too late loses no other.

    Args:
        cells: by worth, the first are measured first.
        command: as `CellProcess` has it.
        folder: each line goes to its `gpu.jsonl`, and what processes print to its `gpu.log`.
        minutes: nothing runs longer.

    Returns:
        The number of cells with figures.
    """
    started = time.monotonic()
    num_measured = 0
    waiting: CellProcess | None = None
    with (folder / "gpu.jsonl").open("a") as lines, (folder / "gpu.log").open("a") as errors:
        for number, cell in enumerate(cells):
            process = waiting or CellProcess(cell, command, errors)
            following = cells[number + 1 : number + 2]
            waiting = CellProcess(following[0], command, errors) if following else None
            began = time.monotonic()
            left_s = 60 * minutes - (began - started)
            found = process.measured(min(cell.limit_s, left_s)) if left_s > 0 else {"failed": "no time left"}
            process.close()
            num_measured += "failed" not in found
            line = {"cell": cell.name, "at_s": round(began - started, 1), "took_s": round(time.monotonic() - began, 1)}
            text = json.dumps(line | found)
            print(text, flush=True)
            print(text, file=lines, flush=True)
    return num_measured
