"""What a run is: its options, their checks, and what they prepare."""
