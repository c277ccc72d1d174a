"""Evaluation and prediction: the loop over batches, accumulation of predictions, metrics and their files."""
