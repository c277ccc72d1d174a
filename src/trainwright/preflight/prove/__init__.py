"""Proofs on the user's own model and data: what must be equal is computed both ways and compared."""
