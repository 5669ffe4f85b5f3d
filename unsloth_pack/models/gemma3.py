from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.models.vision_spec import VisionSpec

SPEC = ArchSpec(
    "gemma3_text",
    window="layer",
    qk_norm="head",
    norm_offset=1.0,
    rotary_per_layer_type=True,
    unread=("attn_logit_softcapping",),
    logit_softcap="final_logit_softcapping",
    tiny=dict(
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=24,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(rope_type="default", rope_theta=1e6),
        ),
    ),
)
VISION = VisionSpec(
    "gemma3",
    tower="vision_tower",
    aligner=("multi_modal_projector",),
    attends="batch",
    grid=None,
    dimensions=(4,),
    side="image_size",
    alike=True,
    both_ways=True,
)
