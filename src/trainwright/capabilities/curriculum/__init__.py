"""Curriculum: sample weights computed from the ledger during training."""
