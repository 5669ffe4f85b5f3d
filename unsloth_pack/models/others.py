from unsloth_pack.models.spec import ArchSpec

GPT_OSS = ArchSpec(
    "gpt_oss", window="layer", angles="once", sinks=True,
    tiny=dict(
        head_dim=32, sliding_window=24, layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4, num_experts_per_tok=2, rope_parameters=dict(rope_type="yarn", rope_theta=1.5e5,
        factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64),
    ),
)  # fmt: skip

HUNYUAN_V1_DENSE = ArchSpec(
    "hunyuan_v1_dense", names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"}, qk_norm="head",
    qk_norm_after_rope=True,
    tiny=dict(
        head_dim=32, attention_bias=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=50.0),
    ),
)  # fmt: skip

COHERE2 = ArchSpec(
    "cohere2", window="layer", rope_layers="windowed", rotary="pairs", angles="side_by_side", norm="layer",
    logit_multiplier="logit_scale",
    tiny=dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"], logit_scale=0.25),
)  # fmt: skip

EXAONE4 = ArchSpec(
    "exaone4", window="is_sliding", qk_norm="head", rope_layers="windowed_if_any",
    tiny=dict(
        head_dim=32, sliding_window=24, sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
)  # fmt: skip

PHI3 = ArchSpec(
    "phi3", names={"act_fn": "activation_fn"}, window="config", fused_qkv=True,
    tiny=dict(
        sliding_window=24,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
)  # fmt: skip

GRANITE = ArchSpec(
    "granite", embedding_multiplier="embedding_multiplier", logit_divisor="logits_scaling",
    tiny=dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
    ),
)  # fmt: skip

SEED_OSS = ArchSpec(
    "seed_oss", tiny=dict(head_dim=32, attention_bias=True, attention_dropout=0.0, residual_dropout=0.0)
)

ERNIE4_5 = ArchSpec("ernie4_5", rotary="pairs", tiny=dict(head_dim=32, use_bias=True))
