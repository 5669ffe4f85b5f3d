"""List the mixers: what decoder layers do between tokens. `ArchSpec.mixers` says which one a layer has."""

from unsloth_pack.layers.mixers.attention import AttentionMixer
from unsloth_pack.layers.mixers.contract import Choice, Mixer, Request
from unsloth_pack.layers.mixers.cross_layer_kv import SharedKVAttentionMixer
from unsloth_pack.layers.mixers.mla import LatentAttentionMixer
from unsloth_pack.layers.mixers.state_space import GATED_DELTA_NET, MAMBA2, SHORT_CONVOLUTION

__all__ = ["MIXERS", "AttentionMixer", "Choice", "Mixer", "Request"]

MIXERS: dict[str, Mixer] = {
    "attention": AttentionMixer(),
    "gated_delta_net": GATED_DELTA_NET,
    "mamba2": MAMBA2,
    "short_convolution": SHORT_CONVOLUTION,
    "latent_attention": LatentAttentionMixer(),
    "shared_kv_attention": SharedKVAttentionMixer(),
}
