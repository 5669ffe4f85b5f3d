"""Define what a packed row is, and read one from a model call."""
