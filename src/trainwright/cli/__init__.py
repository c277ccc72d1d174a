"""The command line: commands, the recipes of `train`, and their tasks."""
