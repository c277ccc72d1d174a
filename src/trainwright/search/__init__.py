"""Hyperparameter search: one backend to a file, behind one small protocol. It never imports the trainer."""
