"""Mixture: several datasets by name as training data, in shares that the arguments set."""
