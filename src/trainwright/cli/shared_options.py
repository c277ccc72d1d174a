"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path, typer.Argument(help="Configuration file; `trainwright init TASK` writes one.", exists=True, dir_okay=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="A.B=VALUE", help="An entry in place of the file's: training.max_steps=100."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")]
