"""Memory of a training step, and changes of settings that make it fit."""
