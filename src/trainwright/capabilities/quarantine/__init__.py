"""Quarantine: samples excluded from a run and from all later runs."""
