"""What can be known before an hour is spent: findings, a memory plan, and proofs on the user's own model and data."""
