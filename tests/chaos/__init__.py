"""Runs that are killed, and checkpoints that are damaged."""
