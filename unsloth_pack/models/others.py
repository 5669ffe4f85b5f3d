from dataclasses import replace

from unsloth_pack.models.spec import LATENT_PROJECTIONS, ArchSpec, VisionSpec

LLAMA = ArchSpec("llama")
ARCEE = ArchSpec("arcee")
APERTUS = ArchSpec("apertus", qk_norm="head")
SMOLLM3 = ArchSpec("smollm3", window="layer", rope_layers="use_rope")
SEED_OSS = ArchSpec("seed_oss")
ERNIE4_5 = ArchSpec("ernie4_5", rotary="pairs")
GRANITE = ArchSpec("granite", embedding_multiplier="embedding_multiplier", logit_divisor="logits_scaling")
PHI3 = ArchSpec("phi3", names={"act_fn": "activation_fn"}, window="config", fused_qkv=True)

OLMO2 = ArchSpec("olmo2", qk_norm="flat", norm_keeps_dtype=True)
OLMO3 = replace(OLMO2, model_type="olmo3", window="layer", rotary_per_layer_type=True)
OLMOE = ArchSpec("olmoe", qk_norm="flat", only={"clip_qkv": None})

GLM4 = ArchSpec("glm4", names={"act_fn": "activation_fn"}, rotary="pairs")
GLM4_MOE = ArchSpec("glm4_moe", qk_norm="head")
GLM4_MOE_LITE = ArchSpec("glm4_moe_lite", attention="latent_attention", projections=LATENT_PROJECTIONS)
DEEPSEEK_V3 = ArchSpec("deepseek_v3", attention="latent_attention", projections=LATENT_PROJECTIONS)
YOUTU = ArchSpec("youtu", attention="latent_attention", projections=LATENT_PROJECTIONS)

GPT_OSS = ArchSpec("gpt_oss", window="layer", angles="once", sinks=True, norm_keeps_dtype=True)
HUNYUAN_V1_DENSE = ArchSpec(
    "hunyuan_v1_dense", names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"}, qk_norm="head",
    qk_norm_after_rope=True,
)  # fmt: skip
COHERE2 = ArchSpec(
    "cohere2", window="layer", rope_layers="windowed", rotary="pairs", angles="side_by_side", norm="layer",
    logit_multiplier="logit_scale",
)  # fmt: skip
EXAONE4 = ArchSpec("exaone4", window="is_sliding", qk_norm="head", rope_layers="windowed_if_any")

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

MISTRAL = ArchSpec("mistral", window="config")
MINISTRAL = ArchSpec("ministral", window="layer")
MINISTRAL3 = ArchSpec("ministral3", window="config", query_scale=True)
MISTRAL3_VISION = VisionSpec(
    "mistral3", tower="vision_tower", aligner=("multi_modal_projector",), attends="sizes", grid=None,
    sizes="image_sizes", options=("vision_feature_layer",), dimensions=(4,),
    rms_norms=("ln_pre", "attention_norm", "ffn_norm"), gated_mlp="feed_forward",
)  # fmt: skip

# transformers makes it inside a model of vision and language only.
MISTRAL4 = ArchSpec(
    "mistral4", stands_alone=False, attention="latent_attention", projections=LATENT_PROJECTIONS,
    query_scale=True,
)  # fmt: skip
MIXTRAL = ArchSpec("mixtral", window="config")
