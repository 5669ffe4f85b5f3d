from dataclasses import replace

from unsloth_pack.models.spec import (
    GRANITE_FACTORS,
    HALF_ROPE,
    LATENT,
    LATENT_PROJECTIONS,
    ROPE,
    ROPE_BY_TYPE,
    ROUTED,
    WINDOWED,
    YARN,
    ArchSpec,
    VisionSpec,
)

LLAMA = ArchSpec("llama", tiny=dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)))
ARCEE = ArchSpec("arcee")
APERTUS = ArchSpec(
    "apertus", qk_norm="head",
    tiny=dict(
        rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
)  # fmt: skip
SMOLLM3 = ArchSpec(
    "smollm3", window="layer", rope_layers="use_rope",
    tiny=dict(**WINDOWED, no_rope_layers=[1, 0], use_sliding_window=True),
)  # fmt: skip
SEED_OSS = ArchSpec(
    "seed_oss", tiny=dict(head_dim=32, attention_bias=True, attention_dropout=0.0, residual_dropout=0.0)
)
ERNIE4_5 = ArchSpec("ernie4_5", rotary="pairs", tiny=dict(head_dim=32, use_bias=True))
GRANITE = ArchSpec(
    "granite", embedding_multiplier="embedding_multiplier", logit_divisor="logits_scaling",
    tiny=GRANITE_FACTORS,
)  # fmt: skip
PHI3 = ArchSpec(
    "phi3", names={"act_fn": "activation_fn"}, window="config", fused_qkv=True,
    tiny=dict(sliding_window=24, rope_parameters=HALF_ROPE),
)  # fmt: skip

OLMO2 = ArchSpec("olmo2", qk_norm="flat")
OLMO3 = ArchSpec(
    "olmo3", window="layer", qk_norm="flat", rotary_per_layer_type=True,
    tiny=dict(**WINDOWED, rope_parameters=ROPE_BY_TYPE),
)  # fmt: skip
OLMOE = ArchSpec(
    "olmoe", qk_norm="flat", only={"clip_qkv": None}, tiny=dict(num_experts=4, num_experts_per_tok=2)
)

GLM4 = ArchSpec(
    "glm4", names={"act_fn": "activation_fn"}, rotary="pairs",
    tiny=dict(head_dim=32, attention_bias=True, rope_parameters=HALF_ROPE),
)  # fmt: skip
GLM4_MOE = ArchSpec(
    "glm4_moe", qk_norm="head",
    tiny=dict(
        **ROUTED, head_dim=32, use_qk_norm=True, attention_bias=True, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, routed_scaling_factor=1.5,
    ),
)  # fmt: skip
GLM4_MOE_LITE = ArchSpec(
    "glm4_moe_lite", attention="latent_attention", projections=LATENT_PROJECTIONS,
    tiny=dict(**LATENT, **ROUTED, mlp_layer_types=["dense", "sparse"], rope_parameters=ROPE),
)  # fmt: skip
DEEPSEEK_V3 = ArchSpec(
    "deepseek_v3", attention="latent_attention", projections=LATENT_PROJECTIONS,
    tiny=dict(
        **LATENT, **ROUTED, first_k_dense_replace=1, n_group=2, topk_group=1, rope_parameters=YARN | dict(
        factor=4.0, original_max_position_embeddings=512, mscale=0.7, mscale_all_dim=1.0),
    ),
)  # fmt: skip
YOUTU = ArchSpec(
    "youtu", attention="latent_attention", projections=LATENT_PROJECTIONS,
    tiny=LATENT | dict(qk_nope_head_dim=8, v_head_dim=8, rope_parameters=ROPE),
)  # fmt: skip

GPT_OSS = ArchSpec(
    "gpt_oss", window="layer", angles="once", sinks=True,
    tiny=dict(
        **WINDOWED, head_dim=32, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN | dict(
        rope_theta=1.5e5, factor=4.0, truncate=False, original_max_position_embeddings=64),
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
    logit_multiplier="logit_scale", tiny=dict(**WINDOWED, logit_scale=0.25),
)  # fmt: skip
EXAONE4 = ArchSpec(
    "exaone4", window="is_sliding", qk_norm="head", rope_layers="windowed_if_any",
    tiny=dict(**WINDOWED, head_dim=32, sliding_window_pattern=2),
)  # fmt: skip

# Its text model is a Llama
IDEFICS3_VISION = VisionSpec(
    "idefics3", tower="vision_model", aligner=("connector",), attends="batch", grid=None,
    options=("pixel_attention_mask",), dimensions=(5,), alike=True, drops_zeros=True,
)  # fmt: skip
SMOLVLM_VISION = replace(IDEFICS3_VISION, model_type="smolvlm")
LLAVA_ONEVISION_VISION = VisionSpec(
    "llava_onevision", tower="vision_tower", aligner=("multi_modal_projector",), attends="batch", grid=None,
    sizes="image_sizes",
    options=("batch_num_images", "vision_feature_layer", "vision_feature_select_strategy"),
    of_documents="batch_num_images", dimensions=(4, 5),
)  # fmt: skip
INTERNVL_VISION = VisionSpec(
    "internvl", tower="vision_tower", aligner=("multi_modal_projector",), attends="batch", grid=None,
    options=("vision_feature_layer", "vision_feature_select_strategy"), dimensions=(4,), alike=True,
)  # fmt: skip

MISTRAL = ArchSpec("mistral", window="config", tiny=dict(sliding_window=24, head_dim=32))
MINISTRAL = ArchSpec("ministral", window="layer", tiny=dict(**WINDOWED, head_dim=32))
MINISTRAL3 = ArchSpec(
    "ministral3", window="config", query_scale=True,
    tiny=dict(
        head_dim=32, sliding_window=24, rope_parameters=YARN | dict(rope_theta=1e6, factor=4.0,
        original_max_position_embeddings=16, llama_4_scaling_beta=0.2),
    ),
)  # fmt: skip
MISTRAL3_VISION = VisionSpec(
    "mistral3", tower="vision_tower", aligner=("multi_modal_projector",), attends="sizes", grid=None,
    sizes="image_sizes", options=("vision_feature_layer",), dimensions=(4,),
    rms_norms=("ln_pre", "attention_norm", "ffn_norm"), gated_mlp="feed_forward",
)  # fmt: skip

# transformers makes it inside a model of vision and language only.
MISTRAL4 = ArchSpec(
    "mistral4", stands_alone=False, attention="latent_attention", projections=LATENT_PROJECTIONS,
    query_scale=True,
    tiny=dict(
        **LATENT, **ROUTED, first_k_dense_replace=1, rope_parameters=YARN | dict(factor=32.0,
        original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5),
    ),
)  # fmt: skip
MIXTRAL = ArchSpec(
    "mixtral", window="config",
    tiny=dict(sliding_window=24, num_local_experts=4, num_experts_per_tok=2),
)  # fmt: skip
