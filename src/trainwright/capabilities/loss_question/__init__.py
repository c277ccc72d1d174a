"""Whether the user's own loss is a mean, or divided already."""
