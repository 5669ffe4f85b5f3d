"""The report of a run: its metrics file, tables, plots and page, and its progress on screen."""
