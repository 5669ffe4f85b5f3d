"""Loading and saving models; folders that are whole or not there."""
