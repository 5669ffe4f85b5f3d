"""The image tokens of every family, as data: one entry for each `config.model_type`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.images.rows import MARK

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Cut:
    """A tower's tokens of an image: tiles in lines, then the whole image."""

    lines: int = 0  # of tiles; 0 without tiles
    columns: int = 0
    of_tile: int = 1  # tokens of each tile
    whole: int = 0  # tokens of the whole image, after its tiles

    @property
    def tokens(self) -> int:
        """The number of all tokens, without marks."""
        return self.lines * self.columns * self.of_tile + self.whole


@dataclass(frozen=True)
class Writing:
    """The text that a processor writes around the placeholders of an image."""

    begin: str = ""  # before everything
    tile: str = ""  # before each tile; `{line}` and `{column}` are its place, from 1
    between: str = ""  # between two lines of tiles
    behind: str = ""  # between the tiles, if any, and the whole image
    whole: str = ""  # before the whole image
    end: str = ""  # after everything
    marks: tuple[str, ...] = ()  # the tokens among these that the tokenizer must have

    def pieces(self, cut: Cut) -> Iterator[tuple[str, int]]:
        """Iterate over marks, perhaps empty, each with the number of placeholders after it."""
        prefix = self.begin
        for line in range(cut.lines):
            prefix += self.between if line else ""
            for column in range(cut.columns):
                yield prefix + self.tile.format(line=line + 1, column=column + 1), cut.of_tile
                prefix = ""
        if cut.whole:
            yield prefix + (self.behind if cut.lines else "") + self.whole, cut.whole
            prefix = ""
        yield prefix + self.end, 0

    def text(self, cut: Cut, placeholder: str) -> str:
        """Return the text in place of an image's placeholder."""
        return "".join(mark + placeholder * times for mark, times in self.pieces(cut))


@dataclass(frozen=True)
class ImageTokens:
    """The text of images in a family of models."""

    placeholder: str  # a chat template writes it once for an image, a processor for each token of the tower
    start: str  # the chat template's marker before it; "" without one
    end: str  # likewise after it
    reserved: tuple[str, ...]  # further tokens, of other media
    processor: str  # the class of the family's processor in transformers, named in saved files
    writing: Writing = field(default_factory=Writing)  # the processor's text beside placeholders
    text_options: tuple[tuple[str, str], ...] = ()  # the processor's own defaults for its tokenizer
    by_text: bool = False  # a call takes one list of images for each text
    # The chat template's text for an image, if not the placeholder. A processor replaces it before it
    # tokenises, so that the text around an image may merge with the image's.
    in_template: str = ""

    @property
    def in_text(self) -> str:
        """The text of an image before tokenisation."""
        return self.in_template or self.placeholder

    def with_placeholders(self, text: str) -> str:
        """Replace each image in a rendered text by one placeholder with its marks."""
        return text.replace(self.in_text, self.writing.text(Cut(whole=1), self.placeholder))

    @property
    def texts(self) -> tuple[str, ...]:
        """All tokens that no text may contain, except `<image>`, which marks an image in a row."""
        tokens = (self.placeholder, self.start, self.end, *self.writing.marks, *self.reserved)
        return tuple(text for text in tokens if text not in ("", MARK))


def _qwen(processor: str) -> ImageTokens:
    markers = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    return ImageTokens(*markers, ("<|video_pad|>",), processor)


def _idefics(processor: str, *reserved: str) -> ImageTokens:
    mark = "<fake_token_around_image>"
    writing = Writing(
        tile=f"{mark}<row_{{line}}_col_{{column}}>",
        between="\n",
        behind="\n\n",
        whole=f"{mark}<global-img>",
        end=mark,
        marks=(mark,),
    )
    return ImageTokens("<image>", "", "", reserved, processor, writing, by_text=True)


IMAGE_TOKENS = {
    "qwen2_vl": _qwen("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("Qwen3VLProcessor"),
    "qwen3_vl_moe": _qwen("Qwen3VLProcessor"),
    "idefics3": _idefics("Idefics3Processor"),
    "smolvlm": _idefics("SmolVLMProcessor", "<video>"),
    "llava_onevision": ImageTokens("<image>", "", "", ("<video>",), "LlavaOnevisionProcessor"),
    "internvl": ImageTokens(
        *("<IMG_CONTEXT>", "", "", ("<video>",), "InternVLProcessor"),
        Writing(begin="<img>", end="</img>", marks=("<img>", "</img>")),
        text_options=(("padding_side", "left"),),
    ),
    "mistral3": ImageTokens(
        *("[IMG]", "", "", (), "PixtralProcessor"),
        Writing(between="[IMG_BREAK]", end="[IMG_END]", marks=("[IMG_BREAK]", "[IMG_END]")),
    ),
    "gemma3": ImageTokens(
        *("<image_soft_token>", "<start_of_image>", "<end_of_image>", (), "Gemma3Processor"),
        Writing(begin="\n\n<start_of_image>", end="<end_of_image>\n\n"),
        by_text=True,
        in_template="<start_of_image>",
    ),
}


def get_image_tokens(config: PretrainedConfig) -> ImageTokens:
    """Return the image tokens of a model; InputError if it takes no images or is not supported."""
    model_type = config.model_type
    if model_type in IMAGE_TOKENS:
        return IMAGE_TOKENS[model_type]
    if not hasattr(config, "vision_config"):
        raise InputError(f"model type {model_type!r} takes no images; load it with FastLanguageModel")
    raise InputError(
        f"images for model type {model_type!r} are not prepared here; use one of {', '.join(IMAGE_TOKENS)}, "
        "or train on rows of text with FastLanguageModel"
    )


class ImageTokenIds:
    """A family's image tokens in one tokenizer."""

    def __init__(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase):
        vocabulary, tokens = tokenizer.get_vocab(), get_image_tokens(config)
        around = [text for text in (tokens.start, tokens.end) if text]
        for text in (tokens.placeholder, *around, *tokens.writing.marks):
            if text not in vocabulary:
                problem = f"the tokenizer has no token {text}, which stands for images"
                raise InputError(f"{problem}; load the one that came with the model")
        self.placeholder = vocabulary[tokens.placeholder]  # the id for each token of the tower
        self._around = tuple(vocabulary[text] for text in around)
        others = (*tokens.writing.marks, *tokens.reserved)
        self._reserved = tuple(vocabulary[text] for text in others if text in vocabulary)
        self._writing = Writing() if tokens.in_template else tokens.writing  # already in the text
        self._tokens, self._tokenizer = tokens, tokenizer
        self._of_mark: dict[str, np.ndarray] = {}
        if (expected := getattr(config, "image_token_id", self.placeholder)) != self.placeholder:
            problem = f"the tokenizer gives {tokens.placeholder} the id {self.placeholder}, the model reads"
            raise InputError(f"{problem} {expected} as an image; load the tokenizer that came with the model")

    @property
    def of_images(self) -> set[int]:
        """The ids that no text may contain."""
        return {self.placeholder, *self._around, *self._reserved}

    def counts(self, ids: np.ndarray) -> tuple[int, list[int], int]:
        """Count placeholders, each kind of marker around them, and misplaced tokens in `[n]` ids."""
        around = [int((ids == marker).sum()) for marker in self._around]
        return int((ids == self.placeholder).sum()), around, int(np.isin(ids, self._reserved).sum())

    def encode(self, cut: Cut) -> np.ndarray:
        """Return the ids in place of an image's placeholder, `[n]` int32."""
        parts = []
        for mark, times in self._writing.pieces(cut):
            parts += [self._encode_mark(mark), np.full(times, self.placeholder, np.int32)]
        return np.concatenate(parts)

    def _encode_mark(self, mark: str) -> np.ndarray:
        """Return the ids of a text between two placeholders."""
        if mark not in self._of_mark:
            around = self._tokens.placeholder
            encoded = self._tokenizer(f"{around}{mark}{around}", add_special_tokens=False)["input_ids"]
            first, last = (place for place, token in enumerate(encoded) if token == self.placeholder)
            self._of_mark[mark] = np.array(encoded[first + 1 : last], np.int32)
        return self._of_mark[mark]

    def expand(self, ids: np.ndarray, images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Replace each placeholder in `[n]` ids by the ids of its image.

        Returns the ids, the index in `ids` that each came from, and True where it belongs to an image or to a
        marker around one.
        """
        is_image = ids == self.placeholder
        repeats = np.ones(len(ids), np.int64)
        repeats[is_image] = [len(image) for image in images]
        places = np.repeat(np.arange(len(ids)), repeats)
        expanded, is_image = ids[places], is_image[places]
        if images:
            expanded[is_image] = np.concatenate(images)
        return expanded, places, is_image | np.isin(expanded, self._around)
