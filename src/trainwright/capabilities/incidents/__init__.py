"""Incidents: bad steps are counted, reported, and saved as bundles that can be replayed."""
