"""Evaluations in another process while a run trains on."""
