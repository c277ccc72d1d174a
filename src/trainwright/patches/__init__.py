"""Changes to a model for one run, each a small object that is applied before and undone after it."""
