"""What a patched model changes of its trainer."""
