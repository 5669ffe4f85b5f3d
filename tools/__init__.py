"""Scripts that make files of the package; they are not part of it."""
