"""Updates that round to nothing: the share of weights in bfloat16 or float16 that a step left as they were."""
