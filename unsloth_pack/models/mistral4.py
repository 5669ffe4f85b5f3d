from unsloth_pack.models.spec import ArchSpec

# transformers makes it inside a model of vision and language only.
SPEC = ArchSpec(
    "mistral4",
    stands_alone=False,
    attention="latent_attention",
    projections=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    query_scale=True,
    tiny=dict(
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=32.0,
            original_max_position_embeddings=64,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
)
