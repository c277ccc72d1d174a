"""A training described in a file: the allowed entries, and the place of each error. Nothing is trained here."""
