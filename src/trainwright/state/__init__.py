"""State that changes during training: record, flags, loss, clock and their owner; speed, memory and tokens."""
