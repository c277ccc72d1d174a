"""Mirror: copies of the checkpoints of a run under a URL of an object store, made in the background."""
