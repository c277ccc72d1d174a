"""Metrics: what an evaluation hands over, how it is collected, and how results are reported."""
