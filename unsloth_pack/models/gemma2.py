from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "gemma2",
    window="layer",
    norm_offset=1.0,
    softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
    tiny=dict(
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
