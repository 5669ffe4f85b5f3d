from unsloth_pack.models.spec import ArchSpec

OLMO2 = ArchSpec("olmo2", qk_norm="flat")

OLMO3 = ArchSpec(
    "olmo3", window="layer", qk_norm="flat", rotary_per_layer_type=True,
    tiny=dict(
        sliding_window=24, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e4),
        full_attention=dict(rope_type="default", rope_theta=1e6)),
    ),
)  # fmt: skip

OLMOE = ArchSpec(
    "olmoe", qk_norm="flat", only={"clip_qkv": None},
    tiny=dict(num_experts=4, num_experts_per_tok=2),
)  # fmt: skip

OLMO_HYBRID = ArchSpec(
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
