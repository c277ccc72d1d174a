"""Live control: commands to a run under way."""
