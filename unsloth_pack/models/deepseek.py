from unsloth_pack.models.spec import ArchSpec

DEEPSEEK_V3 = ArchSpec(
    "deepseek_v3", attention="latent_attention",
    projections=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    tiny=dict(
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=48, rope_parameters=dict(rope_type="yarn", rope_theta=1e4,
        factor=4.0, original_max_position_embeddings=512, beta_fast=32.0, beta_slow=1.0, mscale=0.7,
        mscale_all_dim=1.0),
    ),
)  # fmt: skip

YOUTU = ArchSpec(
    "youtu", attention="latent_attention",
    projections=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    tiny=dict(
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
)  # fmt: skip
