from unsloth_pack.models.vision_spec import VisionSpec

VISION = VisionSpec(
    "internvl",
    tower="vision_tower",
    aligner=("multi_modal_projector",),
    attends="batch",
    grid=None,
    options=("vision_feature_layer", "vision_feature_select_strategy"),
    dimensions=(4,),
    alike=True,
)
