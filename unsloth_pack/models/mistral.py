from unsloth_pack.models.spec import LATENT_PROJECTIONS, ArchSpec, VisionSpec
from unsloth_pack.models.tiny import LATENT, ROUTED, WINDOWED, YARN

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
