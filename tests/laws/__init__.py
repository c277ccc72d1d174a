"""One file for each family: every member obeys the same laws."""
