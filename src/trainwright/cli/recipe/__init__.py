"""A training described in a file: what it may say, and where in it an error stands. Nothing is trained here."""
