"""Iterable datasets: reading, sharing, batching and the state that a checkpoint keeps of them."""
