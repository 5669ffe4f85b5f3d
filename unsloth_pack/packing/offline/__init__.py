"""Packed rows on disk: memory-mapped shards, and a manifest that they are checked against."""

from unsloth_pack.packing.offline.images import PackedImages
from unsloth_pack.packing.offline.manifest import PackManifest, find_packs, read_manifest
from unsloth_pack.packing.offline.reader import read_packs
from unsloth_pack.packing.offline.writer import write_packs

__all__ = ["PackManifest", "PackedImages", "find_packs", "read_manifest", "read_packs", "write_packs"]
