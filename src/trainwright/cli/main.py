"""`trainwright ...`: reports of runs, and comparisons between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import TrainwrightError
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


def _say(write: Callable[[], Path]) -> None:
    try:
        typer.echo(f"Written: {write()}")
    except (OSError, ValueError, TrainwrightError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
