"""What a run says about itself: how full its rows are, its metrics file, its plots and its tables."""
