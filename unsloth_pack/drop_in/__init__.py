"""What notebooks written for Unsloth call beside loading, adapting and training."""
