"""The meter of updates that round to nothing."""
