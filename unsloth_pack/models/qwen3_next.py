from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "qwen3_next",
    mixers={"linear_attention": "gated_delta_net"},
    projections=("in_proj_qkvz", "in_proj_ba", "out_proj"),
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
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0],
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
)
