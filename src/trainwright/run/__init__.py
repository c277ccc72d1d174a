"""One `train()`, `evaluate()` or search: how it is built, resumed and saved. The only package that knows every wing."""
