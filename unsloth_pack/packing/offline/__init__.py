"""Packed rows on disk: shards that are memory-mapped as they lie, and a manifest that vouches for them."""

from unsloth_pack.packing.offline.manifest import PackManifest, find_packs, read_manifest
from unsloth_pack.packing.offline.reader import read_packs
from unsloth_pack.packing.offline.writer import write_packs

__all__ = ["PackManifest", "find_packs", "read_manifest", "read_packs", "write_packs"]
