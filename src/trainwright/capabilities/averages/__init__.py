"""Averages of the weights: exponential, of all entries, or of the last ones."""
