# Its text model is a Llama
from unsloth_pack.models.vision_spec import VisionSpec

VISION = VisionSpec(
    "idefics3",
    tower="vision_model",
    aligner=("connector",),
    attends="batch",
    grid=None,
    options=("pixel_attention_mask",),
    dimensions=(5,),
    alike=True,
    drops_zeros=True,
)
