"""Packed rows: which samples share a row, their tensors, and whether a model isolates them."""
