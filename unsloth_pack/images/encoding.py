"""Encode conversations with images as token ids and labels, in the lengths that they will have in a row."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from jinja2 import TemplateError

from unsloth_pack.data.encoding import IGNORE_INDEX, TEMPLATE_REFUSALS, Encoder
from unsloth_pack.data.formats import learned_roles
from unsloth_pack.data.rows import fail
from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.reading import ImageSource, UnreadableImage, read_size
from unsloth_pack.images.rows import ImageRow, image_row, with_parts
from unsloth_pack.images.tokens import Cut, ImageTokenIds, get_image_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


Overlong = Literal["error", "truncate", "drop", "shrink"]
_NO_LIMIT = 2**31 - 1

# Maps ids and labels `[n]` to labels `[n]`; labels of -100 stay -100
Relabel = Callable[[np.ndarray, np.ndarray], np.ndarray]


def renders_strings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a chat template renders a turn whose content is a string.

    Those of Idefics, SmolVLM and LLaVA render only lists of parts, and silently drop a string.
    """

    def renders(contents: Sequence[Any]) -> bool:
        turns = [{"role": role, "content": each} for role, each in zip(roles, contents, strict=True)]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except (TemplateError, *TEMPLATE_REFUSALS):
            return False
        return all(each in text for each in texts)

    roles, texts = ("user", "assistant"), ("a question 7", "an answer 7")
    return renders(texts) or not renders([[{"type": "text", "text": text}] for text in texts])


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image of a document."""

    source: ImageSource
    tokens: int  # in the place of its placeholder
    height: int  # in pixels, with EXIF orientation applied
    width: int
    most_pixels: int | None  # to which it is shrunk; None for the processor's limit
    cut: Cut  # the tower's share of the tokens
    of_document: int  # number of images in its document


@dataclass(frozen=True, eq=False)
class VisionDocument:
    """One conversation. `ids` is empty for a refused document."""

    ids: np.ndarray  # `[n]` int32, with a placeholder for each token of an image, and marks among them
    labels: np.ndarray  # `[n]` int32
    images: list[PlacedImage]  # in their order; none is decoded yet
    read: int  # tokens before the cut
    saved: int = 0  # tokens that shrinking its images has saved

    @property
    def is_learnable(self) -> bool:
        """True if a token counts in the loss."""
        return bool((self.labels[1:] != IGNORE_INDEX).any())


@dataclass
class VisionCounts:
    """Counts of the rows in this process."""

    documents: int = 0
    tokens: int = 0
    images: int = 0
    vision_tokens: int = 0
    truncated: int = 0  # documents cut after their last image
    shrunk: int = 0  # documents whose images were shrunk to fit
    dropped: int = 0  # documents that did not fit
    broken: int = 0  # rows with an unreadable image
    unlearnable: int = 0  # rows without a token in the loss

    def __str__(self) -> str:
        return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in asdict(self).items())


class VisionEncoder:
    """Encode rows as documents.

    Args:
        config, make_images: of the model.
        max_length: tokens of the longest document, with images; None for no limit.
        overlong: for a longer document, as in `VisionDataCollator`.
        image_folder: the root of relative paths.
        responses_only: only assistant turns count in the loss, as `relabel` or the chat template marks them.
        relabel: replaces labels, for example to learn answers after a marker.
        skip_broken: skip rows with an unreadable image.
        skip_overlong: return a document without tokens in place of a refused one, so that it can be counted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        make_images: ImageFamily,
        *,
        max_length: int | None = None,
        overlong: Overlong = "error",
        image_folder: str | os.PathLike[str] | None = None,
        responses_only: bool = False,
        relabel: Relabel | None = None,
        skip_broken: bool = False,
        skip_overlong: bool = False,
    ):
        if overlong not in get_args(Overlong):
            raise InputError(f"overlong is {overlong!r}; choose one of {', '.join(get_args(Overlong))}")
        if overlong == "shrink" and not make_images.shrinks:
            problem = "overlong is 'shrink', and the model's processor has no size to shrink images by"
            raise InputError(f"{problem}; choose one of error, truncate, drop")
        if max_length is not None:
            require_whole("max_seq_length", max_length, 1)
        if image_folder is not None and not Path(image_folder).is_dir():
            raise InputError(f"image_folder is {str(image_folder)!r}, which is no folder; correct it")
        if not tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template; use an instruct model, or set one")
        self._tokenizer, self._tokens, self._make_images = tokenizer, get_image_tokens(config), make_images
        self.token_ids = ImageTokenIds(config, tokenizer)
        self.counts = VisionCounts()
        self._max_length, self._overlong, self._skip_overlong = max_length, overlong, skip_overlong
        self._skip_broken, self._relabel = skip_broken, relabel
        self._responses_only = responses_only and relabel is None
        self._folder = None if image_folder is None else Path(image_folder)
        self._learned = learned_roles(responses_only if relabel is None else None)
        self._renders_strings = renders_strings(tokenizer)
        self._encoders: dict[tuple[str, ...], Encoder] = {}

    def __call__(self, rows: Sequence[object]) -> list[VisionDocument]:
        """Encode some rows and count the skipped ones. Call `count` for a document once it is decoded."""
        documents = []
        for document in self.each(rows, range(len(rows))):
            if document is not None and document.is_learnable:
                documents.append(document)
            elif document is not None:
                self.counts.unlearnable += 1
        return documents

    def each(self, rows: Iterable[object], numbers: Iterable[int]) -> Iterator[VisionDocument | None]:
        """Encode every row, even without a token in the loss; None for a skipped row."""
        return map(self._document, numbers, rows)

    def files(self, index: int, row: object) -> list[tuple[str, int, int]]:
        """List path, size and time of the row's image files."""
        return [
            (str(source.content), about.st_size, about.st_mtime_ns)
            for source in self._row(index, row).images
            if isinstance(source.content, Path)
            for about in [source.read_file(Path.stat)]
        ]

    def _row(self, index: int, row: object) -> ImageRow:
        return image_row(index, row, self._folder, self._learned, self._tokens.texts)

    def _document(self, index: int, row: object) -> VisionDocument | None:
        try:
            parsed = self._row(index, row)
            images = [self._place(source, read_size(source), len(parsed.images)) for source in parsed.images]
        except UnreadableImage:
            if not self._skip_broken:
                raise
            self.counts.broken += 1
            return None
        return self._fit(parsed, *self._encode(parsed), images)

    def count(self, document: VisionDocument) -> None:
        """Count a document and its images."""
        self.counts.documents += 1
        self.counts.tokens += len(document.ids)
        self.counts.images += len(document.images)
        self.counts.vision_tokens += _count_tokens(document.images)

    def _place(
        self, source: ImageSource, size: tuple[int, int], of_document: int, most: int | None = None
    ) -> PlacedImage:
        cut = self._make_images.cut(source, size, most, of_document)
        return PlacedImage(source, len(self.token_ids.encode(cut)), *size, most, cut, of_document)

    def _encode(self, row: ImageRow) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels, with one placeholder for each image."""
        turns = with_parts(row.turns, everywhere=not self._renders_strings)
        columns = {"prompt": turns[: row.n_prompt], "completion": turns[row.n_prompt :]}
        columns = columns if row.n_prompt else {"messages": turns}
        names = tuple(columns)
        if names not in self._encoders:
            template = None
            if self._tokens.in_template:  # the text around an image may merge with its marks
                template = self._tokens.with_placeholders(self._tokenizer.get_chat_template())
            self._encoders[names] = Encoder(
                self._tokenizer,
                names,
                True,
                max_length=_NO_LIMIT,
                responses_only=self._responses_only,
                chat_template=template,
            )
        batch = {name: [value] for name, value in (columns | row.beside).items()}
        encoded = self._encoders[names](batch, range(row.index, row.index + 1))
        self._check(row, encoded.ids)
        labels = encoded.labels if self._relabel is None else self._relabel(encoded.ids, encoded.labels)
        return encoded.ids, labels

    def _check(self, row: ImageRow, ids: np.ndarray) -> None:
        """Refuse ids whose image tokens do not match the row's images."""
        n_images = len(row.images)
        placeholders, around, reserved = self.token_ids.counts(ids)
        if {placeholders, *around} != {n_images} or reserved:
            problem = f"{n_images} images, and the chat template writes {placeholders} placeholders"
            remedy = "use the model's own chat template, and no tokens of images in texts or tools"
            fail(row.index, row.column, problem, [turn.get("content") for turn in row.turns], remedy)

    def _fit(
        self, row: ImageRow, ids: np.ndarray, labels: np.ndarray, images: list[PlacedImage]
    ) -> VisionDocument | None:
        """Fit the document into `max_length` tokens; None if it is dropped."""
        text = len(ids) - len(images)
        length = text + _count_tokens(images)
        limit, saved = self._max_length or length, 0
        if length > limit:
            if self._overlong == "drop":
                self.counts.dropped += 1
                return None
            if self._overlong == "shrink":
                images = self._shrink(images, limit - text)
                saved = length - text - _count_tokens(images)
                self.counts.shrunk += 1
            if self._overlong != "truncate" and length - saved > limit and not self._skip_overlong:
                return self._refuse(row, length, "a document that is too long")
        image_ids = [self.token_ids.encode(image.cut) for image in images]
        ids, places, is_vision = self.token_ids.expand(ids, image_ids)
        labels = np.where(is_vision, np.int32(IGNORE_INDEX), labels[places])
        read = len(ids)
        if read > limit:
            if is_vision[limit:].any():
                return self._refuse(row, length, "a document that would be cut before the end of an image")
            ids, labels = ids[:limit], labels[:limit]
            self.counts.truncated += 1
        return VisionDocument(ids, labels, images, read, saved)

    def _shrink(self, images: list[PlacedImage], room: int) -> list[PlacedImage]:
        """Shrink the images to the largest limit of tokens that fits all of them into `room`."""
        make = self._make_images
        of_token = make.pixels_of_tokens(1)
        least = -(-make.pixel_limits[0] // of_token) if make.pixel_limits else 1

        def shrink(image: PlacedImage, most_tokens: int) -> PlacedImage:
            """Raise the limit until `least` tokens are left: rounding leaves fewer than the limit."""
            place = partial(self._place, image.source, (image.height, image.width), image.of_document)
            limits = map(make.pixels_of_tokens, count(max(most_tokens, least)))
            smaller = (place(min(limit, make.most_pixels)) for limit in limits)
            small = next(each for each in smaller if each.cut.tokens >= min(least, image.cut.tokens))
            return small if small.tokens < image.tokens else image

        def limit_all(most_tokens: int) -> list[PlacedImage]:
            return [shrink(image, most_tokens) for image in images]

        limits = range(1, -(-make.most_pixels // of_token) + 1)
        largest = bisect_right(limits, room, key=lambda limit: _count_tokens(limit_all(limit)))
        return limit_all(max(largest, 1))

    def _refuse(self, row: ImageRow, length: int, problem: str) -> VisionDocument:
        """Refuse a document that is too long, or return it without tokens."""
        if self._skip_overlong:
            nothing = np.zeros(0, np.int32)
            return VisionDocument(nothing, nothing, [], length)
        problem += f" ({length} tokens with its images, max_seq_length is {self._max_length})"
        turns = [turn.get("content") for turn in row.turns]
        fail(row.index, row.column, problem, turns, "raise max_seq_length, or choose another overlong")


def _count_tokens(images: Iterable[PlacedImage]) -> int:
    return sum(image.tokens for image in images)
