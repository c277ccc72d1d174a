"""`trainwright train`: a training as a file describes it."""

from __future__ import annotations

from trainwright.cli.exit_codes import reporting, say
from trainwright.cli.shared_options import Config, Overrides


def train(config: Config, overrides: Overrides = None) -> None:
    """Train as a configuration file says; evaluate and save the model."""
    with reporting():
        from trainwright.cli.recipe.recipe_reader import checked, read_tree
        from trainwright.cli.tasks.recipe_run import refuse_a_second_run, run

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        refuse_a_second_run(recipe, tree)
        run(recipe, tree, say)
