from dataclasses import replace

from unsloth_pack.models.spec import VisionSpec

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
