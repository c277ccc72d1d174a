"""`trainwright compare`: one HTML file that shows several runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import reporting
from trainwright.cli.shared_options import Output


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of two runs or more.")],
    output: Output = None,
) -> None:
    """Write an HTML file that shows where several runs part, and why."""
    with reporting():
        from trainwright.report.comparison_page import write_comparison

        typer.echo(f"Written: {write_comparison(runs, output or 'comparison.html')}")
