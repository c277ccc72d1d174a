"""Types of parameters that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Processes = Annotated[
    int | None, typer.Option("--processes", "-m", min=1, help="Number of processes to start, by torchrun.")
]
Changed = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="A.B=VALUE", help="An entry: training.seed=1."),
]
