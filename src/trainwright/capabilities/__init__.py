"""The capabilities: one folder each, with everything that belongs to it. `capability_table.py` lists them."""
