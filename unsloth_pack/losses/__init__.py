"""Compute losses together with the language-model head."""
