"""Loss scale: fp16 steps that a fused optimizer skipped on the device do not advance the schedule."""
