"""Packing: plan which documents share a row, fill rows from memory or from a stream, keep rows on disk.

No torch needed.
"""

from unsloth_pack.packing.dataset import pack_dataset
from unsloth_pack.packing.offline import (
    PackedImages,
    PackManifest,
    find_packs,
    read_manifest,
    read_packs,
    write_packs,
)
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
    "PackManifest",
    "PackPlan",
    "PackedImages",
    "PackedSampler",
    "PackingStream",
    "PackingWarning",
    "StreamCounts",
    "concatenate_and_pack",
    "find_packs",
    "length_report",
    "pack_dataset",
    "pack_sequences",
    "plan_accumulation",
    "plan_packs",
    "read_manifest",
    "read_packs",
    "vision_tokens",
    "write_packs",
]
