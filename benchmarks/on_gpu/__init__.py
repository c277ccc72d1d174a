"""The parts of gpu.py: cells and their processes, models, loops, stalls, tables."""
