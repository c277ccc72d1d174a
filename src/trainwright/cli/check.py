"""`trainwright check`: what would go wrong, found before the first step."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.cli.exits import FAILED, reporting, say
from trainwright.cli.settings import Config, Overrides


def check(
    config: Config,
    overrides: Overrides = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also plan the memory of a step.")] = False,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="With --memory: what there is, as 24GB.")] = None,
) -> None:
    """Look for what would go wrong, without training."""
    with reporting():
        from trainwright.recipe.read import checked, read_tree
        from trainwright.tasks.build import make_trainer

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        report = make_trainer(recipe, tree, say).check(memory=memory or budget is not None, budget=budget)
        for line in report.lines():
            typer.echo(line)
        if report.worst == "error":
            raise typer.Exit(FAILED)
