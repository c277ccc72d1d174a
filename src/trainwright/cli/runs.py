"""`trainwright runs`: a table of the runs below a directory, from their journals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import reporting


def runs(
    folder: Annotated[Path, typer.Argument(help="Directory to look below.", metavar="DIR", exists=True)] = Path("."),
) -> None:
    """Show the runs below a directory: state, best, steps, time."""
    with reporting():
        from rich.console import Console
        from rich.table import Table

        from trainwright.report.run_table import ago, find_runs, readable_time

        found, now = find_runs(folder), time.time()
        if not found:
            typer.echo(f"No run is below {folder}: none has a journal.jsonl.")
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("run", "state", "best", "step", "time", "written"):
            table.add_column(name, justify="right" if name in ("step", "time") else "left", overflow="fold")
        for one in found:
            table.add_row(
                one.name, one.state, one.best_text, one.steps_text, readable_time(one.seconds), ago(one.written_at, now)
            )
        Console().print(table)
