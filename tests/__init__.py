"""A package of its own, so that a data package with a top-level `tests` does not stand in its place."""
