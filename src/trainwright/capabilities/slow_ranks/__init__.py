"""Names processes that the others wait for."""
