"""Rules of the house that are read from the sources, one failure list each; `make lint` runs them in one process."""
