"""`trainwright report`, `compare`, `runs` and `push`: pages, a table and uploads of finished runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import FAILED, reporting
from trainwright.cli.shared_options import Output


def report(
    run: Annotated[Path, typer.Argument(help="Output directory of a run or a search, or a journal.jsonl.")],
    output: Output = None,
) -> None:
    """Write an HTML file that shows a run or a search."""
    with reporting():
        from trainwright.report.run_page import write_report
        from trainwright.report.search_page import has_search, write_search_report

        write = write_search_report if has_search(run) else write_report
        typer.echo(f"Written: {write(run, output)}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of two runs or more.")],
    output: Output = None,
) -> None:
    """Write an HTML file that shows where several runs part, and why."""
    with reporting():
        from trainwright.report.comparison_page import write_comparison

        typer.echo(f"Written: {write_comparison(runs, output or 'comparison.html')}")


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


def push(
    run: Annotated[Path, typer.Argument(help="Output directory of a run.")],
    token: Annotated[str | None, typer.Option(help="Of the Hub; by default that of the login.")] = None,
) -> None:
    """Upload to the Hub what a training with push_to_hub could not."""
    with reporting():
        from trainwright.hub.client import HubClient
        from trainwright.hub.outbox import Outbox
        from trainwright.hub.uploader import Uploader

        num_waiting = len(Outbox(run).waiting())
        if Uploader(run, run.resolve().name, client=HubClient(token)).finish():
            raise typer.Exit(FAILED)
        typer.echo(f"Uploaded: {num_waiting}")
