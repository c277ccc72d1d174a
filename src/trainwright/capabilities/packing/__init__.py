"""Packing: several samples in a row, so that batches have almost no padding."""
