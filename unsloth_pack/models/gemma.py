from unsloth_pack.models.spec import ROPE, ROPE_BY_TYPE, WINDOWED, ArchSpec, VisionSpec

GEMMA = ArchSpec("gemma", norm_offset=1.0, tiny=dict(head_dim=32))
GEMMA2 = ArchSpec(
    "gemma2", window="layer", norm_offset=1.0, softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
    tiny=dict(
        **WINDOWED, head_dim=32, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
)  # fmt: skip
GEMMA3 = ArchSpec(
    "gemma3_text", window="layer", qk_norm="head", norm_offset=1.0, rotary_per_layer_type=True,
    unread=("attn_logit_softcapping",), logit_softcap="final_logit_softcapping",
    tiny=dict(
        **WINDOWED, head_dim=32, query_pre_attn_scalar=24, final_logit_softcapping=10.0,
        rope_parameters=ROPE_BY_TYPE,
    ),
)  # fmt: skip
GEMMA3_VISION = VisionSpec(
    "gemma3", tower="vision_tower", aligner=("multi_modal_projector",), attends="batch", grid=None,
    dimensions=(4,), side="image_size", alike=True, both_ways=True,
)  # fmt: skip
GEMMA4 = ArchSpec(
    "gemma4_text", attention="shared_kv_attention", window="layer", norm_keeps_dtype=True, kv_sharing=True,
    per_layer_inputs=True, rotary_per_layer_type=True, logit_softcap="final_logit_softcapping",
    placeholders=("image_token_id", "video_token_id", "audio_token_id"), wrapper_has_softcap=True,
    tiny=dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        use_double_wide_mlp=True, head_dim=8, global_head_dim=16, attention_k_eq_v=True,
        num_global_key_value_heads=1, sliding_window=24, final_logit_softcapping=10.0,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=512,
        rope_parameters=dict(sliding_attention=ROPE,
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6)),
    ),
)  # fmt: skip
