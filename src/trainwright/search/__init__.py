"""Hyperparameter search: its trials, and a backend per file behind a small protocol. It never imports the trainer."""
