"""Iterable datasets: reading, sharing, batching, and their state in checkpoints."""
