"""`trainwright ...`: reports of runs, comparisons between them, and uploads that wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import TrainwrightError
from trainwright.hub.client import HubClient
from trainwright.hub.outbox import Outbox
from trainwright.hub.uploader import Uploader, listed
from trainwright.report.compare import write_comparison
from trainwright.report.page import write_report

app = typer.Typer(help="Shows what trainings did, from their journals.", no_args_is_help=True, add_completion=False)

Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")]


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Output directory of a run, or its journal.jsonl.")],
    output: Output = None,
) -> None:
    """Writes one HTML file that shows a run: curves, time, incidents, checkpoints, arguments."""
    _say(lambda: write_report(run, output))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of two runs or more.")],
    output: Output = None,
) -> None:
    """Writes one HTML file with the curves of several runs, what differs, and where their losses part."""
    _say(lambda: write_comparison(runs, output or "comparison.html"))


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Output directory of a run.")],
    token: Annotated[str | None, typer.Option(help="Of the Hub; by default that of the login.")] = None,
) -> None:
    """Uploads to the Hub what a training with push_to_hub could not."""
    num_waiting = len(Outbox(run).waiting())
    left = Uploader(run, run.resolve().name, client=HubClient(token)).finish()
    if left:
        typer.echo(listed(left, run), err=True)
        raise typer.Exit(1)
    typer.echo(f"Uploaded: {num_waiting}")


def _say(write: Callable[[], Path]) -> None:
    try:
        typer.echo(f"Written: {write()}")
    except (OSError, ValueError, TrainwrightError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
