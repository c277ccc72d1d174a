"""Fingerprints of the values of a few steps, written on demand, and the comparison of two such records."""
