"""The forwards that all architectures share."""
