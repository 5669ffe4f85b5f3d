"""Forwards of models of vision and language, and of their towers."""
