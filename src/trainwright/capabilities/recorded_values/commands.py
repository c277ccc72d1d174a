"""`trainwright diff`: the first value that differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.command_line import FAILED, AsJson, amount, print_json, print_line


def diff(
    run: Annotated[Path, typer.Argument(help="Output directory of a run with record_values.", metavar="RUN")],
    other: Annotated[Path, typer.Argument(help="Output directory of the other run.", metavar="OTHER")],
    tolerance: Annotated[
        float | None,
        typer.Option(parser=amount, metavar="NUMBER", help="Difference to ignore, relative to a tensor's norm."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name the first value that differs between two runs."""
    from trainwright.capabilities.recorded_values.value_comparison import compare_values, read_values

    found = compare_values(read_values(run), read_values(other), tolerance=tolerance)
    if as_json:
        print_json(found.to_dict())
    else:
        for line in found.lines():
            print_line(line)
    if not found.is_same:
        raise typer.Exit(FAILED)
