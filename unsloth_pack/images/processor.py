"""A processor of images and text without torchvision: a model's image processor and tokenizer.

transformers' processors of the Qwen-VL family also have a video processor, which needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

from transformers import (
    AutoImageProcessor,
    BatchFeature,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.image_utils import make_nested_list_of_images
from transformers.models.auto.video_processing_auto import get_video_processor_config

from unsloth_pack.checkpoints.loading import find_model, load_with
from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.reading import require_pillow
from unsloth_pack.images.tokens import IMAGE_TOKENS, get_image_tokens
from unsloth_pack.models.spec import MODALITIES

_SAVED = ("processor_config.json", "tokenizer_config.json")
_OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
_WITH_MODALITIES = f"return_{MODALITIES}"


class VisionProcessor(ProcessorMixin):
    """transformers' processor of images and text, without videos.

    `processor(images=..., text=..., return_tensors="pt")`, `apply_chat_template`, `decode` and
    `save_pretrained` work as in transformers. Saved files name the model's own processor class, so that
    transformers and servers load them.
    """

    def __init__(
        self,
        image_processor: object,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        config: PretrainedConfig,
        of_videos: Mapping[str, object] | None = None,
    ):
        """Take the model's configuration, and that of its video processor, to be saved."""
        self._tokens = tokens = get_image_tokens(config)
        self._family = make_image_family(config, image_processor)
        self._of_videos = of_videos or {}
        self.image_token = tokens.in_text
        self.image_token_id: Any = tokenizer.convert_tokens_to_ids(tokens.in_text)
        self.image_token_ids: Any = tokenizer.convert_tokens_to_ids(
            [tokens.placeholder, *tokens.writing.marks]
        )
        self.text_kwargs = cast(Any, {"return_token_type_ids": False, **dict(tokens.text_options)})
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Lay out inputs as transformers does, with a flat list of images cut into one list for each text."""
        images, text, *others = super().prepare_inputs_layout(images, text, *args, **kwargs)
        if images is not None and self._tokens.by_text:
            images = make_nested_list_of_images(images)
            texts = [text] if isinstance(text, str) else text or []
            if len(images) == 1 and len(texts) > 1:
                ends = [*accumulate(string.count(self.image_token) for string in texts)]
                images = [images[0][begin:end] for begin, end in pairwise([0, *ends])]
        return images, text, *others

    def __call__(self, images: object = None, text: object = None, **kwargs: Any) -> BatchFeature:
        """Return ids of the text with image tokens, and pixels of the images."""
        options = {name: value for name, value in self._family.options().items() if name not in kwargs}
        if images is not None and options:
            kwargs["images_kwargs"] = options | kwargs.get("images_kwargs", {})
        # Every version has this argument; the default is True only if the model takes its output
        token_types = self._family.token_types
        if _WITH_MODALITIES not in kwargs.get("text_kwargs", {}):
            kwargs.setdefault(_WITH_MODALITIES, token_types is not None)
        batch: BatchFeature = super().__call__(images=images, text=text, **kwargs)
        if MODALITIES in batch:
            batch[token_types or MODALITIES] = batch.pop(MODALITIES)
        return batch

    def replace_image_token(self, image_inputs: dict[str, object], image_idx: int, **kwargs: object) -> str:
        """Return the text for an image's token."""
        cut = self._family.cut_from_output(image_inputs, image_idx)
        return self._tokens.writing.text(cut, self._tokens.placeholder)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the tokenizer, the image processor and the chat template into a folder."""
        if push_to_hub:
            raise InputError("push_to_hub is True, which a processor does not do here; upload the folder")
        super().save_pretrained(str(save_directory), **kwargs)
        for name in _SAVED:
            path = Path(save_directory, name)
            saved = json.loads(path.read_text(encoding="utf-8")) | {"processor_class": self._tokens.processor}
            if name == _SAVED[0]:
                saved |= self._family.saved()
                saved |= {"video_processor": self._of_videos} if self._of_videos else {}
            path.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def model_input_names(self) -> list[str]:
        """The names of a model's inputs in the output."""
        return [*super().model_input_names, *filter(None, [self._family.token_types])]

    def to_dict(self) -> dict[str, Any]:
        """Return the processor's own configuration, to be saved."""
        others = ("of_videos", "config")
        return {name: value for name, value in super().to_dict().items() if name not in others}

    @property
    def unused_input_names(self) -> list[str]:
        """Further outputs of image processors, which no model takes."""
        return ["rows", "cols", "num_patches", "num_crops"]


def find_processor_folder(model_name: str) -> str:
    """Find a model's processor: beside an adapter, with its limits of pixels, else in its base model."""
    source, adapter = find_model(model_name)
    has_own = adapter is not None and any(Path(adapter, name).is_file() for name in _OF_IMAGES)
    return adapter if adapter and has_own else source


def load_image_processor(
    source: str,
    config: PretrainedConfig,
    max_pixels: int | None = None,
    min_pixels: int | None = None,
    **hub: object,
) -> Any:
    """Load a model's image processor, with other limits of pixels or with its own (None)."""
    require_pillow()
    get_image_tokens(config)  # refuses other models
    limits = {"max_pixels": max_pixels, "min_pixels": min_pixels}
    limits = {name: value for name, value in limits.items() if value is not None}
    for name, value in limits.items():
        require_whole(name, value, 1)
    processor = load_with(AutoImageProcessor, source, **hub)
    if make_image_family(config, processor).pixel_limits is not None:
        return limit_pixels(processor, max_pixels, min_pixels)
    for name, value in limits.items():
        raise InputError(
            f"{name} is {value}, and images of model type {config.model_type!r} have no such limit; leave it "
            f"out, or limit them in {' or '.join(_OF_IMAGES)} of a copy of {source}"
        )
    return processor


def limit_pixels(image_processor: Any, max_pixels: int | None, min_pixels: int | None) -> Any:
    """Set other limits of an image processor; InputError if they contradict, or are below one token."""
    size = image_processor.size
    most = size["longest_edge"] if max_pixels is None else max_pixels
    least = min(size["shortest_edge"], most) if min_pixels is None else min_pixels
    a_token = (image_processor.patch_size * image_processor.merge_size) ** 2
    if not most >= max(least, a_token):
        problem = f"max_pixels is {most}, and one token is {a_token} pixels, min_pixels {least}"
        raise InputError(f"{problem}; give a range")
    image_processor.size = {"shortest_edge": least, "longest_edge": most}
    return image_processor


def build_processor(
    source: str,
    image_processor: object,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    **hub: Any,
) -> VisionProcessor:
    """Build the processor of a model from its parts.

    A processor's chat template beside the tokenizer replaces the tokenizer's, which may be for text only.
    """
    files = {name: value for name, value in hub.items() if name != "trust_remote_code"}
    of_videos = get_video_processor_config(source, **files)
    template = _saved_template(tokenizer.name_or_path or source, files) or tokenizer.chat_template
    tokenizer.chat_template = template or _saved_template(source, files)
    return VisionProcessor(image_processor, tokenizer, tokenizer.chat_template, config, of_videos)


def _saved_template(source: str, files: Mapping[str, object]) -> str | None:
    try:
        return ProcessorMixin.get_processor_dict(source, **files)[0].get("chat_template")
    except (OSError, ValueError, LookupError) as error:
        problem = f"cannot load {source}: its processor cannot be read ({error})"
        raise InputError(f"{problem}; correct its files") from None


def pick_processor(
    model: PreTrainedModel, source: str, tokenizer: PreTrainedTokenizerBase
) -> VisionProcessor | PreTrainedTokenizerBase:
    """Return the processor to save with a model merged from `source`, or the tokenizer if it has none."""
    if model.config.model_type not in IMAGE_TOKENS:
        return tokenizer
    place = find_processor_folder(source)
    try:
        image_processor = load_image_processor(place, model.config)
        return build_processor(place, image_processor, tokenizer, model.config)
    except InputError:
        if place == source:
            raise
        return tokenizer  # trained on text, and the base has no processor, or Pillow is missing
