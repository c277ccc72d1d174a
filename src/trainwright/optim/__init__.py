"""Optimizers and learning-rate schedules: from names and settings to torch objects."""
