from unsloth_pack.models.spec import ArchSpec, VisionSpec

GEMMA = ArchSpec("gemma", norm_offset=1.0)
GEMMA2 = ArchSpec(
    "gemma2", window="layer", norm_offset=1.0, softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)  # fmt: skip
GEMMA3 = ArchSpec(
    "gemma3_text", window="layer", qk_norm="head", norm_offset=1.0, rotary_per_layer_type=True,
    unread=("attn_logit_softcapping",), logit_softcap="final_logit_softcapping",
)  # fmt: skip
GEMMA3_VISION = VisionSpec(
    "gemma3", tower="vision_tower", aligner=("multi_modal_projector",), attends="batch", grid=None,
    dimensions=(4,), side="image_size", alike=True, both_ways=True,
)  # fmt: skip
GEMMA4 = ArchSpec(
    "gemma4_text", attention="shared_kv_attention", window="layer", norm_keeps_dtype=True, kv_sharing=True,
    per_layer_inputs=True, rotary_per_layer_type=True, logit_softcap="final_logit_softcapping",
    placeholders=("image_token_id", "video_token_id", "audio_token_id"), wrapper_has_softcap=True,
)  # fmt: skip
