"""Guards: what happens with a step whose loss or gradient is not usable."""
