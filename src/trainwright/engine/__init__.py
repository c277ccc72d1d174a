"""Engines: all that differs between backends, which only this package, `config/` and `distributed/` name."""
