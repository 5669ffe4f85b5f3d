from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.models.vision_spec import VisionSpec

SPEC = ArchSpec(
    "qwen3_vl_text",
    qk_norm="head",
    axes="interleaved",
    stands_alone=False,
    tiny=dict(
        head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
    ),
)
VISION = VisionSpec(
    "qwen3_vl",
    aligner=("visual.merger", "visual.deepstack_merger_list"),
    deepstack="deepstack_visual_indexes",
    interpolates=True,
)
