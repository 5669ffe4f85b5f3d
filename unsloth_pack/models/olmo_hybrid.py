from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
    "olmo_hybrid",
    mixers={"linear_attention": "gated_delta_net"},
    projections=("a_proj", "b_proj", "g_proj"),
    qk_norm="flat",
    tiny=dict(
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        rope_parameters=None,  # as in released models: nothing rotates
    ),
)
