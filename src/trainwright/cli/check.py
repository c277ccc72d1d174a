"""`trainwright check`: what would go wrong, found before the first step."""

from __future__ import annotations

from trainwright.cli.exits import reporting, say
from trainwright.cli.settings import Config, Overrides


def check(config: Config, overrides: Overrides = None) -> None:
    """Check configuration, data and model without training."""
    with reporting():
        from trainwright.recipe.read import checked, read_tree
        from trainwright.tasks.build import make_trainer

        tree = read_tree(config, overrides or ())
        recipe = checked(tree, config.absolute().parent)
        make_trainer(recipe, tree, say)
        say("check", "configuration, data and model fit together")
