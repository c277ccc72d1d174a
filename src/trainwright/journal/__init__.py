"""The journal of a run, and where its time went."""
