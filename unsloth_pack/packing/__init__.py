"""Packing: plan which documents share a row, fill rows from memory or from a stream, keep rows on disk.

No torch needed.
"""

from unsloth_pack.packing.dataset import pack_dataset
from unsloth_pack.packing.forecast import (
    LengthReport,
    PackForecast,
    length_report,
    plan_accumulation,
    vision_tokens,
)
from unsloth_pack.packing.in_memory import CutCounts, PackingWarning, concatenate_and_pack, pack_sequences
from unsloth_pack.packing.on_disk import (
    PackedImages,
    PackManifest,
    find_packs,
    read_manifest,
    read_packs,
    write_packs,
)
from unsloth_pack.packing.planner import Bins, PackPlan, plan_packs
from unsloth_pack.packing.sampler import CostSpread, PackedSampler
from unsloth_pack.packing.stream import PackingStream, StreamCounts

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
