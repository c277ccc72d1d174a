"""What changes during training: the record, the flags, the loss, and their single owner."""
