"""`trainwright report`: one HTML file that shows a run or a search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import reporting
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
