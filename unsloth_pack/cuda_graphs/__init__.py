"""The captured step: a decoder's forward and backward as CUDA graphs."""
