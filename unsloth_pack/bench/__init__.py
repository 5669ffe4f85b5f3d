"""Measure a short training run in a process of its own, and the time of its step by category."""
