from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec(
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
