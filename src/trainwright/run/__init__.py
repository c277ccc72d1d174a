"""One `train()`, `evaluate()` or search: building, resuming and saving it. The only package that uses all others."""
