"""Capabilities beyond training, evaluating, saving and resuming: one folder each, known to the loop as an Extension."""
