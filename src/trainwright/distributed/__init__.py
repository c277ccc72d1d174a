"""Processes of a run: rank and world, process group, collectives, watchdog. It knows no arguments."""
