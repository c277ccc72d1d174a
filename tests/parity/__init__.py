"""Bit for bit with `transformers.Trainer`: same seed, same settings, same weights, same logs."""
