"""Quarantine: samples that are excluded from a run and from all runs after it."""
