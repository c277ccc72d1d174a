"""Incidents: bad steps are counted, reported, and written down as bundles that can be replayed."""
