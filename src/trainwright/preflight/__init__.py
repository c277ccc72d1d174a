"""Checks before training: findings, a memory plan, and proofs on the user's own model and data."""
