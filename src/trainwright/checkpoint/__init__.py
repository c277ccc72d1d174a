"""Checkpoints: directories that exist or do not, what is in them, and which of them may go."""
