"""Mixers: what a decoder layer does between tokens. Which one a layer has is data, see `ArchSpec.mixers`.

Each mixer is a module of this folder, and an entry of `MIXERS`.
"""

from unsloth_pack.forwards.mixers.attention import AttentionMixer
from unsloth_pack.forwards.mixers.contract import Choice, Mixer, Request
from unsloth_pack.forwards.mixers.latent_attention import LatentAttentionMixer
from unsloth_pack.forwards.mixers.shared_kv_attention import SharedKVAttentionMixer

__all__ = ["MIXERS", "AttentionMixer", "Choice", "Mixer", "Request"]

MIXERS: dict[str, Mixer] = {
    "attention": AttentionMixer(),
    "latent_attention": LatentAttentionMixer(),
    "shared_kv_attention": SharedKVAttentionMixer(),
}
