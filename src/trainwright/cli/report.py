"""`trainwright report`: one HTML file that shows a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exits import reporting
from trainwright.cli.settings import Output


def report(
    run: Annotated[Path, typer.Argument(help="Output directory of a run, or its journal.jsonl.")],
    output: Output = None,
) -> None:
    """Write an HTML file that shows a run: curves, time, incidents."""
    with reporting():
        from trainwright.report.page import write_report

        typer.echo(f"Written: {write_report(run, output)}")
