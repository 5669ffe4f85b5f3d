from unsloth_pack.models.spec import ArchSpec

# A text token has the same position on all three axes, so they rotate as one.
SPEC = ArchSpec(
    "qwen3_5_text",
    mixers={"linear_attention": "gated_delta_net"},
    projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    output_gate=True,
    qk_norm="head",
    norm_offset=1.0,
    tiny=dict(
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[3, 3, 2]
        ),
    ),
)
