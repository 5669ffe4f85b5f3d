"""Losses that are computed together with the language-model head."""
