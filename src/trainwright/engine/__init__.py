"""The engine room: all that differs between backends. Brands are named here and in `config/` only."""
