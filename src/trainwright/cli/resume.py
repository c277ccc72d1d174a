"""`trainwright resume`: goes on with a run that `trainwright train` began."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import reporting, say
from trainwright.cli.shared_options import Overrides


def resume(
    run: Annotated[Path, typer.Argument(help="Output directory of a run, or one of its checkpoints.")],
    overrides: Overrides = None,
) -> None:
    """Go on with a run from its newest intact checkpoint."""
    with reporting():
        from trainwright.cli.tasks.recipe_run import read_run
        from trainwright.cli.tasks.recipe_run import run as carry_out

        recipe, tree = read_run(run.absolute(), overrides or ())
        carry_out(recipe, tree, say)
