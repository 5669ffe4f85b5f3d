"""What a run reports: how full its rows are, its metrics file, its plots, its tables and its progress."""
