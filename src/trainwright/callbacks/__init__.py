"""Callbacks: objects that watch and steer a run from outside the loop."""
