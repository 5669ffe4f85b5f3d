"""Spending less GPU memory: gradient checkpointing, offloading, giving memory back."""
