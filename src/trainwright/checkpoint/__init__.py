"""Checkpoints: directories committed atomically, their contents, and which of them may be deleted."""
