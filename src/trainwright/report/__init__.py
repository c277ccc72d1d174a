"""Pages that show runs, made of their journals."""
