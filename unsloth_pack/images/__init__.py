"""Images in rows: found, read, counted in tokens, and turned into documents of ids, labels and patches."""
