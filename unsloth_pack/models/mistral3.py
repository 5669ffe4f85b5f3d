from unsloth_pack.models.vision_spec import VisionSpec

VISION = VisionSpec(
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
