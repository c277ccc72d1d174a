"""Data: the order of samples, their batches, and the position of a run in them."""
