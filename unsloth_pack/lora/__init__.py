"""LoRA layers on frozen weights, and their arithmetic."""
