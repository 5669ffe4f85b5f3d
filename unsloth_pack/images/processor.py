"""A processor of images and text without torchvision: a model's image processor beside its tokenizer.

transformers' own processors of the Qwen-VL family also hold a video processor, which needs torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.video_processing_auto import get_video_processor_config

from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.files.loading import load_with, resolve
from unsloth_pack.images.reading import require_pillow
from unsloth_pack.images.tokens import IMAGE_TOKENS, ImageTokens, image_tokens_of

_NEEDED = ("patch_size", "merge_size", "temporal_patch_size", "get_number_of_image_patches")
_SAVED = ("processor_config.json", "tokenizer_config.json")


class VisionProcessor(ProcessorMixin):
    """Images and text as a model takes them: transformers' processor, but for videos.

    `processor(images=..., text=..., return_tensors="pt")`, `apply_chat_template`, `decode` and
    `save_pretrained` are those of transformers. What is saved names the model's own processor class, so that
    transformers and servers load it.
    """

    # As in transformers' classes: which tokens are images, by which a model finds their positions
    return_mm_token_type_ids = True
    text_kwargs = {"return_token_type_ids": False}  # noqa: RUF012

    def __init__(
        self,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        tokens: ImageTokens | None = None,
        of_videos: dict[str, Any] | None = None,
    ):
        """Args: tokens: the family's; of_videos: the configuration of its video processor, to be saved."""
        if tokens is not None:
            self.image_token = tokens.placeholder
            self.image_token_id = tokenizer.convert_tokens_to_ids(tokens.placeholder)
        self._tokens, self._of_videos = tokens, of_videos or {}
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs: Any) -> str:
        """The placeholders of one image."""
        patches = image_inputs["image_grid_thw"][image_idx].prod()
        return self.image_token * int(patches // self.image_processor.merge_size**2)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the tokenizer, the image processor and the chat template into a folder."""
        if push_to_hub:
            raise InputError("push_to_hub is True, which a processor does not do here; upload the folder")
        super().save_pretrained(str(save_directory), **kwargs)
        if self._tokens is None:
            return
        for name in _SAVED:
            path = Path(save_directory, name)
            saved = json.loads(path.read_text(encoding="utf-8")) | {"processor_class": self._tokens.processor}
            if name == _SAVED[0] and self._of_videos:
                saved["video_processor"] = self._of_videos
            path.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def model_input_names(self) -> list[str]:
        """What a model takes of the output."""
        return [*super().model_input_names, "mm_token_type_ids"]

    def to_dict(self) -> dict[str, Any]:
        """What is saved of the processor itself."""
        parts = super().to_dict()
        return {name: value for name, value in parts.items() if name not in ("tokens", "of_videos")}


def load_image_processor(
    source: str, *, max_pixels: int | None = None, min_pixels: int | None = None, **hub: Any
) -> Any:
    """A model's image processor, with PIL where torchvision is missing.

    Args:
        max_pixels, min_pixels: pixels to which larger and smaller images are resized; None for the model's.

    Raises:
        InputError: it cannot be loaded, is of a family that is not prepared here, or the limits are wrong.
    """
    require_pillow()
    for name, value in (("max_pixels", max_pixels), ("min_pixels", min_pixels)):
        if value is not None:
            require_whole(name, value, 1)
    processor = load_with(AutoImageProcessor, source, **hub)
    if missing := [name for name in _NEEDED if not hasattr(processor, name)]:
        raise InputError(
            f"the image processor of {source} is {type(processor).__name__}, which has no {missing[0]}; "
            "give a model of the Qwen-VL family"
        )
    return limit_pixels(processor, max_pixels, min_pixels)


def limit_pixels(image_processor: Any, max_pixels: int | None, min_pixels: int | None) -> Any:
    """The image processor with other limits.

    Raises:
        InputError: an image of the smallest size would be above the largest, or below one token.
    """
    size = image_processor.size
    least = size["shortest_edge"] if min_pixels is None else min_pixels
    most = size["longest_edge"] if max_pixels is None else max_pixels
    if min_pixels is None and max_pixels is not None:
        least = min(least, most)
    a_token = (image_processor.patch_size * image_processor.merge_size) ** 2
    if least > most:
        raise InputError(f"min_pixels is {least} and max_pixels is {most}; give a range")
    if most < a_token:
        raise InputError(f"max_pixels is {most}, and one token is {a_token} pixels; raise it")
    image_processor.size = {"shortest_edge": least, "longest_edge": most}
    return image_processor


def processor_of(
    source: str, image_processor: Any, tokenizer: Any, tokens: ImageTokens, **hub: Any
) -> VisionProcessor:
    """The processor of a model from its parts."""
    files = {name: value for name, value in hub.items() if name != "trust_remote_code"}
    of_videos = get_video_processor_config(source, **files)
    return VisionProcessor(image_processor, tokenizer, tokenizer.chat_template, tokens, of_videos)


def saved_beside(model: Any, source: str, tokenizer: Any) -> Any:
    """What is saved beside a model: the processor that is in a folder, or the tokenizer where there is none.

    Args:
        source: the folder of an adapter or of a model; where an adapter has none, that of its base counts.
    """
    if model.config.model_type not in IMAGE_TOKENS:
        return tokenizer
    for place in dict.fromkeys((source, resolve(source)[0])):
        try:
            image_processor = load_image_processor(place)
            return processor_of(place, image_processor, tokenizer, image_tokens_of(model.config))
        except InputError:  # it was trained on text, or Pillow is missing
            continue
    return tokenizer


def check_same_sizes(config: Any, image_processor: Any) -> None:
    """Refuse a processor whose patches are not those of the model's tower.

    Raises:
        InputError: names the size; or images for this model are not prepared here.
    """
    image_tokens_of(config)
    pairs = {"patch_size": "patch_size", "merge_size": "spatial_merge_size"}
    for ours, theirs in (pairs | {"temporal_patch_size": "temporal_patch_size"}).items():
        has, needs = getattr(image_processor, ours, None), getattr(config.vision_config, theirs)
        if has != needs:
            raise InputError(
                f"the image processor's {ours} is {has}, the model's {theirs} {needs}; give the processor "
                "that came with the model"
            )
