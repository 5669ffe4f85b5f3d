"""What `tests/grid.py` measures: the cases, the models and reference runs of each, how they are judged."""
