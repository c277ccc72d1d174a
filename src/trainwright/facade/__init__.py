"""The façade in parts: the published hooks, one family to a file. `trainer.Trainer` is all of them."""
