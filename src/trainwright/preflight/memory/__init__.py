"""How much memory a training step takes, and what to change so that it fits."""
