"""Losses from the language-model head, without logits of all tokens."""
