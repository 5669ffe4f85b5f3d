from unsloth_pack.models.vision_spec import VisionSpec

VISION = VisionSpec(
    "llava_onevision",
    tower="vision_tower",
    aligner=("multi_modal_projector",),
    attends="batch",
    grid=None,
    sizes="image_sizes",
    options=("batch_num_images", "vision_feature_layer", "vision_feature_select_strategy"),
    of_documents="batch_num_images",
    dimensions=(4, 5),
)
