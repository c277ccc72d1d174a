"""Hyperparameter search: its trials, and one backend to a file, behind one small protocol. It never imports the trainer."""
