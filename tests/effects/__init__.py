"""What each field of the arguments does: a table of fields with a check for each, kept complete by a test."""
