"""Writes fingerprints of the values of a few steps, on demand; `value_comparison` compares two such records."""
