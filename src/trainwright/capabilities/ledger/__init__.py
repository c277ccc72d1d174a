"""Ledger: visits and losses of single samples, and losses by source of a mixture."""
