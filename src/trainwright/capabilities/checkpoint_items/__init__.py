"""Checkpoint items: objects of the user with a state that is saved and restored with the run."""
