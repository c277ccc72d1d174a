"""Callbacks: what watches and steers a run from outside of the loop."""
