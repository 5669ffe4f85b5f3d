"""TRL's trainer for packed rows and long runs."""
