"""`trainwright train`: a training as a file describes it."""

from __future__ import annotations

from trainwright.cli.exits import reporting, say
from trainwright.cli.settings import Config, Overrides


def train(config: Config, overrides: Overrides = None) -> None:
    """Train as a configuration file says; evaluate and save the model."""
    with reporting():
        from trainwright.recipe.read import checked, read_tree
        from trainwright.tasks.session import refuse_a_second_run, run

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        refuse_a_second_run(recipe, tree)
        run(recipe, tree, say)
