"""What a packed row is, and how a model call describes one."""
