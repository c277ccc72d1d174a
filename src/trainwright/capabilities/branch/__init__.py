"""Where a run comes from, for a branch of another run."""
