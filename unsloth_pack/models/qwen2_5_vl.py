from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.models.vision_spec import VisionSpec

SPEC = ArchSpec(
    "qwen2_5_vl_text",
    window="layer",
    axes="blocks",
    stands_alone=False,
    tiny=dict(
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]),
    ),
)
VISION = VisionSpec("qwen2_5_vl", windows=True, rms_norms=("norm1", "norm2", "ln_q"), gated_mlp="mlp")
