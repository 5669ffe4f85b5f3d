from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "cohere2",
    window="layer",
    rope_layers="windowed",
    rotary="pairs",
    angles="side_by_side",
    norm="layer",
    logit_multiplier="logit_scale",
    tiny=dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"], logit_scale=0.25),
)
