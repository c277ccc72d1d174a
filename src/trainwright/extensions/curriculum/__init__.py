"""Curriculum: weights of samples that follow from the ledger while the run goes on."""
