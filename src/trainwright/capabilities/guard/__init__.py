"""Guards: handle steps with an unusable loss or gradient."""
