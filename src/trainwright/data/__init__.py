"""Data: the order of samples, batches from it, and where in it a run stands."""
