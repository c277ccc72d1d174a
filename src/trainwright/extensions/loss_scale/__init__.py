"""Loss scale: steps in fp16 that a fused optimizer skipped on the device do not advance the schedule."""
