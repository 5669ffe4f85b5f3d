"""Which class prepares the images of a model type."""

from typing import Any

from unsloth_pack.images.maker import ImageMaker
from unsloth_pack.images.pixels import PatchMaker
from unsloth_pack.images.squares import SquareMaker
from unsloth_pack.images.tiles import AnyresMaker, CanvasMaker, SplitMaker
from unsloth_pack.images.tokens import image_tokens_of
from unsloth_pack.images.whole_sizes import SizesMaker

_MAKERS: dict[str, type[ImageMaker[Any]]] = {
    "qwen2_vl": PatchMaker,
    "qwen2_5_vl": PatchMaker,
    "qwen3_vl": PatchMaker,
    "qwen3_vl_moe": PatchMaker,
    "idefics3": SplitMaker,
    "smolvlm": SplitMaker,
    "llava_onevision": AnyresMaker,
    "internvl": CanvasMaker,
    "mistral3": SizesMaker,
    "gemma3": SquareMaker,
}


def maker_of(config: Any) -> type[ImageMaker[Any]]:
    """The class that prepares images for a model.

    Raises:
        InputError: the model takes no images, or they are not prepared here.
    """
    image_tokens_of(config)
    return _MAKERS[config.model_type]


def image_maker(config: Any, image_processor: Any) -> ImageMaker[Any]:
    """What prepares images for a model by its image processor.

    Raises:
        InputError: see `maker_of`; the image processor is of another family, or has other sizes.
    """
    return maker_of(config)(image_processor, config)
