"""Packing: plan which documents share a row, and fill rows from memory or from a stream. No torch needed."""

from unsloth_pack.packing.dataset import pack_dataset
from unsloth_pack.packing.overlong import CutCounts, PackingWarning
from unsloth_pack.packing.plan import Bins, PackPlan, plan_packs
from unsloth_pack.packing.report import LengthReport, PackForecast, length_report, plan_accumulation
from unsloth_pack.packing.sampler import CostSpread, PackedSampler
from unsloth_pack.packing.sequences import concatenate_and_pack, pack_sequences
from unsloth_pack.packing.stream import PackingStream, StreamCounts
from unsloth_pack.packing.vision import vision_tokens

__all__ = [
    "Bins",
    "CostSpread",
    "CutCounts",
    "LengthReport",
    "PackForecast",
    "PackPlan",
    "PackedSampler",
    "PackingStream",
    "PackingWarning",
    "StreamCounts",
    "concatenate_and_pack",
    "length_report",
    "pack_dataset",
    "pack_sequences",
    "plan_accumulation",
    "plan_packs",
    "vision_tokens",
]
