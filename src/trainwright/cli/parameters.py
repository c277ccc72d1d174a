"""Types of parameters that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Processes = Annotated[
    int | None, typer.Option("--processes", "-m", min=1, help="Start N processes with torchrun.", metavar="N")
]
Changed = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="A.B=VALUE", help="Override an entry: training.seed=1."),
]
