from unsloth_pack.models.spec import ArchSpec

GLM4 = ArchSpec(
    "glm4", names={"act_fn": "activation_fn"}, rotary="pairs",
    tiny=dict(
        head_dim=32, attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
)  # fmt: skip

GLM4_MOE = ArchSpec(
    "glm4_moe", qk_norm="head",
    tiny=dict(
        head_dim=32, use_qk_norm=True, attention_bias=True, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=48, first_k_dense_replace=1, n_group=2, topk_group=1,
        routed_scaling_factor=1.5,
    ),
)  # fmt: skip

GLM4_MOE_LITE = ArchSpec(
    "glm4_moe_lite",
    attention="latent_attention",
    projections=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    tiny=dict(
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=24,  # v begins behind it; torch's attention on a GPU loads 16 bytes at a time
        qk_rope_head_dim=8,
        v_head_dim=16,
        mlp_layer_types=["dense", "sparse"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
)
