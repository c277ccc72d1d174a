"""The command line: a file for each command, the recipes of `train`, and their tasks."""
