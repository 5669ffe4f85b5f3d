from dataclasses import replace

from unsloth_pack.models.spec import ArchSpec, VisionSpec

QWEN2 = ArchSpec("qwen2", window="layer")
QWEN3 = ArchSpec("qwen3", window="layer", qk_norm="head")
QWEN2_MOE = ArchSpec("qwen2_moe", window="layer")
QWEN3_MOE = ArchSpec("qwen3_moe", window="layer", qk_norm="head")

# A text token has the same position on all three axes, so they rotate as one.
QWEN3_5 = ArchSpec(
    "qwen3_5_text", mixers={"linear_attention": "gated_delta_net"},
    projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), output_gate=True,
    qk_norm="head", norm_offset=1.0,
)  # fmt: skip
QWEN3_5_MOE = replace(QWEN3_5, model_type="qwen3_5_moe_text")
QWEN3_NEXT = ArchSpec(
    "qwen3_next", mixers={"linear_attention": "gated_delta_net"},
    projections=("in_proj_qkvz", "in_proj_ba", "out_proj"), output_gate=True, qk_norm="head", norm_offset=1.0,
)  # fmt: skip

QWEN2_VL = ArchSpec("qwen2_vl_text", window="layer", axes="blocks", stands_alone=False)
QWEN2_VL_VISION = VisionSpec("qwen2_vl")
QWEN2_5_VL = replace(QWEN2_VL, model_type="qwen2_5_vl_text")
QWEN2_5_VL_VISION = VisionSpec(
    "qwen2_5_vl", windows=True, rms_norms=("norm1", "norm2", "ln_q"), gated_mlp="mlp"
)
QWEN3_VL = ArchSpec("qwen3_vl_text", qk_norm="head", axes="interleaved", stands_alone=False)
QWEN3_VL_VISION = VisionSpec(
    "qwen3_vl", aligner=("visual.merger", "visual.deepstack_merger_list"),
    deepstack="deepstack_visual_indexes", interpolates=True,
)  # fmt: skip
QWEN3_VL_MOE = replace(QWEN3_VL, model_type="qwen3_vl_moe_text")
QWEN3_VL_MOE_VISION = replace(QWEN3_VL_VISION, model_type="qwen3_vl_moe")
