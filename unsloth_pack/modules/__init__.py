"""Looking at modules: their hooks, their parameters, how their weights are sharded."""
