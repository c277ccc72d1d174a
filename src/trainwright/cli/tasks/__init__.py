"""The tasks of the command line: from rows of a file to a Trainer. A recipe says what; Trainer does the training."""
