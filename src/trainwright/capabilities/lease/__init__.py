"""Lease: only one live run saves into an output directory."""
