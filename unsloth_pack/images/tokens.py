"""Which tokens stand for an image, as data: one entry for each `config.model_type`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError


@dataclass(frozen=True)
class ImageTokens:
    """How a family of models writes images into its text.

    Args:
        placeholder: the token that a chat template writes once for an image, and that is then repeated for
            each of its merged patches.
        start, end: the markers around them.
        reserved: further tokens that stand for other media.
        processor: the class of the family's processor in transformers, named in saved files.
    """

    placeholder: str
    start: str
    end: str
    reserved: tuple[str, ...]
    processor: str

    @property
    def texts(self) -> tuple[str, ...]:
        """All tokens that no text may hold."""
        return (self.placeholder, self.start, self.end, *self.reserved)


def _qwen(processor: str) -> ImageTokens:
    markers = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    return ImageTokens(*markers, ("<|video_pad|>",), processor)


IMAGE_TOKENS = {
    "qwen2_vl": _qwen("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("Qwen3VLProcessor"),
    "qwen3_vl_moe": _qwen("Qwen3VLProcessor"),
}


def image_tokens_of(config: Any) -> ImageTokens:
    """The image tokens of a model.

    Raises:
        InputError: the model takes no images, or they are not prepared here.
    """
    model_type = config.model_type
    if model_type in IMAGE_TOKENS:
        return IMAGE_TOKENS[model_type]
    if not hasattr(config, "vision_config"):
        raise InputError(f"model type {model_type!r} takes no images; load it with FastLanguageModel")
    raise InputError(
        f"images for model type {model_type!r} are not prepared here; use one of {', '.join(IMAGE_TOKENS)}, "
        "or train on rows of text with FastLanguageModel"
    )


@dataclass(frozen=True)
class ImageTokenIds:
    """The ids of a family's image tokens in one tokenizer.

    Args:
        placeholder, start, end: see `ImageTokens`.
        reserved: ids that may not be in a document at all.
    """

    placeholder: int
    start: int
    end: int
    reserved: tuple[int, ...]

    @classmethod
    def of(cls, tokens: ImageTokens, tokenizer: Any, config: Any = None) -> ImageTokenIds:
        """The ids of the tokens.

        Raises:
            InputError: the tokenizer lacks one, or the model reads another id as an image.
        """
        vocabulary = tokenizer.get_vocab()
        for text in (tokens.placeholder, tokens.start, tokens.end):
            if text not in vocabulary:
                raise InputError(
                    f"the tokenizer has no token {text}, which stands for images; load the one that came "
                    "with the model"
                )
        reserved = tuple(vocabulary[text] for text in tokens.reserved if text in vocabulary)
        placeholder, start, end = (
            vocabulary[text] for text in (tokens.placeholder, tokens.start, tokens.end)
        )
        ids = cls(placeholder, start, end, reserved)
        expected = getattr(config, "image_token_id", ids.placeholder)
        if expected != ids.placeholder:
            raise InputError(
                f"the tokenizer gives {tokens.placeholder} the id {ids.placeholder}, the model reads "
                f"{expected} as an image; load the tokenizer that came with the model"
            )
        return ids

    def counts(self, ids: np.ndarray) -> tuple[int, int, int, int]:
        """How many placeholders, starts, ends and reserved tokens there are."""
        placeholder, start, end = ((ids == one).sum() for one in (self.placeholder, self.start, self.end))
        return int(placeholder), int(start), int(end), int(np.isin(ids, self.reserved).sum())

    def expanded(self, ids: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids in which the placeholder of each image is repeated, and the place that each came from.

        Args:
            ids: `[n]` with one placeholder an image.
            tokens: how many each image takes, in order.
        """
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == self.placeholder] = tokens
        places = np.repeat(np.arange(len(ids)), repeats)
        return ids[places], places

    def carry_no_loss(self, ids: np.ndarray) -> np.ndarray:
        """`[n]` bool: where an image or one of its markers stands."""
        return np.isin(ids, (self.placeholder, self.start, self.end))
