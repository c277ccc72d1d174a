"""The tasks of the command line: from rows of a file to a Trainer, as described in a recipe."""
