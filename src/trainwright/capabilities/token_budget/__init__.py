"""Token budget: batches of samples of similar length, with a limit of tokens in place of a number of samples."""
