"""Arguments: fields, older names, rules between them, and the plans of a run."""
