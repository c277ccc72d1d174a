"""Former places of public extensions, which pickles name. Capabilities are in `capabilities/`."""
