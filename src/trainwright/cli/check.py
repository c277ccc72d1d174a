"""`trainwright check`: what would go wrong, found before the first step."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.cli.exit_codes import FAILED, reporting, say
from trainwright.cli.shared_options import Config, Overrides


def check(
    config: Config,
    overrides: Overrides = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also plan the memory of a step.")] = False,
    prove: Annotated[bool, typer.Option("--prove", help="Also compute in two ways what must be equal.")] = False,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="With --memory: what there is, as 24GB.")] = None,
) -> None:
    """Look for what would go wrong, without training."""
    with reporting():
        from trainwright.cli.recipe.recipe_reader import checked, read_tree
        from trainwright.cli.tasks.trainer_builder import make_trainer

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        trainer = make_trainer(recipe, tree, say)
        report = trainer.check(memory=memory or budget is not None, budget=budget)
        typer.echo(str(report))
        proof = trainer.prove() if prove and report.worst != "error" else None
        if proof is not None:
            typer.echo(f"\n{proof}")
        if report.worst == "error" or (proof is not None and not proof.holds):
            raise typer.Exit(FAILED)
