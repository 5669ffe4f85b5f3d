from unsloth_pack.models.spec import ArchSpec, VisionSpec

MISTRAL = ArchSpec("mistral", window="config", tiny=dict(sliding_window=24, head_dim=32))

MINISTRAL = ArchSpec(
    "ministral", window="layer",
    tiny=dict(head_dim=32, sliding_window=24, layer_types=["sliding_attention", "full_attention"]),
)  # fmt: skip

MINISTRAL3 = ArchSpec(
    "ministral3", window="config", query_scale=True,
    tiny=dict(
        head_dim=32, sliding_window=24, rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0,
        original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, llama_4_scaling_beta=0.2),
    ),
)  # fmt: skip

MISTRAL3_VISION = VisionSpec(
    "mistral3",
    tower="vision_tower",
    aligner=("multi_modal_projector",),
    attends="sizes",
    grid=None,
    sizes="image_sizes",
    options=("vision_feature_layer",),
    dimensions=(4,),
    rms_norms=("ln_pre", "attention_norm", "ffn_norm"),
    gated_mlp="feed_forward",
)

# transformers makes it inside a model of vision and language only.
MISTRAL4 = ArchSpec(
    "mistral4", stands_alone=False, attention="latent_attention",
    projections=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), query_scale=True,
    tiny=dict(
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=32.0,
        original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.5),
    ),
)  # fmt: skip

MIXTRAL = ArchSpec(
    "mixtral", window="config",
    tiny=dict(sliding_window=24, num_local_experts=4, num_experts_per_tok=2),
)  # fmt: skip
