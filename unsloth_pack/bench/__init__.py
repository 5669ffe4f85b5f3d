"""Measure a short training run in a process of its own, and the time of its step by category."""

from unsloth_pack.bench.breakdown import HOST_GAPS
from unsloth_pack.bench.case import Case, Figures, plain_packing_leaks
from unsloth_pack.bench.measure import Failed, measure_apart

__all__ = ["HOST_GAPS", "Case", "Failed", "Figures", "measure_apart", "plain_packing_leaks"]
