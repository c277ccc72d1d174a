"""`trainwright init`, `check`, `train` and `resume`: a training from a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import FAILED, echo, reporting, say

Config = Annotated[
    Path, typer.Argument(help="Configuration file; `trainwright init TASK` writes one.", exists=True, dir_okay=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="A.B=VALUE", help="An entry in place of the file's: training.max_steps=100."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")]


def _tasks(incomplete: str) -> list[tuple[str, str]]:
    from trainwright.cli.recipe.schema import TASKS

    return [(name, spec.title) for name, spec in TASKS.items() if name.startswith(incomplete)]


def init(
    task: Annotated[str, typer.Argument(help="What to train; the name of no task lists them.", autocompletion=_tasks)],
    config: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)] = Path("config.yaml"),
    everything: Annotated[bool, typer.Option("--all", help="List every setting, with its default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented configuration file that trains as it stands."""
    with reporting():
        from trainwright._types import write_text
        from trainwright.cli.recipe.schema import TASKS
        from trainwright.cli.recipe.training_section import template
        from trainwright.errors import RecipeError, did_you_mean

        if task not in TASKS:
            listed = "\n".join(f"    {name:<22}{spec.title}" for name, spec in TASKS.items())
            raise RecipeError(f"{task!r} is not a task.{did_you_mean(task, TASKS)} Tasks:\n{listed}")
        if config.exists() and not force:
            raise RecipeError(f"{config} is there already. Name another file, or say --force to write over it.")
        config.parent.mkdir(parents=True, exist_ok=True)
        write_text(config, template(task, with_everything=everything))
        echo(f"Written: {config}. Train with\n\n    trainwright train {config}")


def train(config: Config, overrides: Overrides = None) -> None:
    """Train as a configuration file says; evaluate and save the model."""
    with reporting():
        from trainwright.cli.recipe.recipe_reader import checked, read_tree
        from trainwright.cli.tasks.recipe_run import refuse_a_second_run, run

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        refuse_a_second_run(recipe, tree)
        run(recipe, tree, say)


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
        from trainwright.cli.tasks.recipe_run import make_trainer

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        trainer = make_trainer(recipe, tree, say)
        report = trainer.check(memory=memory or budget is not None, budget=budget)
        echo(str(report))
        proof = trainer.prove() if prove and report.worst != "error" else None
        if proof is not None:
            echo(f"\n{proof}")
        if report.worst == "error" or (proof is not None and not proof.holds):
            raise typer.Exit(FAILED)
