"""Choose the class that prepares the images of a model type."""

from typing import Any

from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.gemma3 import Gemma3Images
from unsloth_pack.images.pixtral import PixtralImages
from unsloth_pack.images.qwen_vl import QwenVLImages
from unsloth_pack.images.tiled import AnyresImages, CanvasImages, SplitImages
from unsloth_pack.images.tokens import get_image_tokens

_MAKERS: dict[str, type[ImageFamily[Any]]] = {
    "qwen2_vl": QwenVLImages,
    "qwen2_5_vl": QwenVLImages,
    "qwen3_vl": QwenVLImages,
    "qwen3_vl_moe": QwenVLImages,
    "idefics3": SplitImages,
    "smolvlm": SplitImages,
    "llava_onevision": AnyresImages,
    "internvl": CanvasImages,
    "mistral3": PixtralImages,
    "gemma3": Gemma3Images,
}


def image_family_class(config: Any) -> type[ImageFamily[Any]]:
    """Return the class that prepares images for a model; InputError if it takes none or is not supported."""
    get_image_tokens(config)
    return _MAKERS[config.model_type]


def make_image_family(config: Any, image_processor: Any) -> ImageFamily[Any]:
    """Create the image family of a model from its image processor.

    Raises:
        InputError: see `image_family_class`; the image processor is of another family, or has other sizes.
    """
    return image_family_class(config)(image_processor, config)
