"""How a run prepares rows with images, and whether it has any."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from unsloth_pack.chat_templates.marked_answers import answers_of
from unsloth_pack.data.mapped import scan
from unsloth_pack.data.tokenize import Documents, made_by
from unsloth_pack.errors import InputError
from unsloth_pack.files.loading import load_config, resolve
from unsloth_pack.images.documents import VisionEncoder
from unsloth_pack.images.families import image_maker
from unsloth_pack.images.maker import ImageMaker
from unsloth_pack.images.prepared import ImageDocumentMaker, holds_images, unused_columns, without_images
from unsloth_pack.images.processor import (
    VisionProcessor,
    load_image_processor,
    processor_of,
)
from unsloth_pack.images.tokens import ImageTokenIds, ImageTokens, image_tokens_of
from unsloth_pack.recipe.image_options import ImageOptions
from unsloth_pack.training.image_rows import ImageRowCollator

_BATCH = 1000  # documents whose tokens are looked at at a time


@dataclass(frozen=True, eq=False)
class ImagePreparation:
    """Makes documents of rows with images.

    Args:
        config: of the model.
        processor: its processor, with the limits that the options set.
        tokens, token_ids: that stand for images.
        options: how images are prepared.
        keep_bytes: documents hold the content of image files, instead of their paths.
    """

    config: Any
    processor: VisionProcessor
    tokens: ImageTokens
    token_ids: ImageTokenIds
    options: ImageOptions
    keep_bytes: bool = False

    @property
    def folder(self) -> Path | None:
        """Where the paths of images begin."""
        return None if self.options.image_folder is None else Path(self.options.image_folder)

    @property
    def make_images(self) -> ImageMaker[Any]:
        return image_maker(self.config, self.processor.image_processor)

    def collator(self) -> ImageRowCollator:
        """What makes batches of the rows."""
        skip_broken = self.options.skip_broken_images
        return ImageRowCollator(self.make_images, self.token_ids, self.folder, skip_broken=skip_broken)

    def documents(
        self, rows: Dataset, max_length: int, responses_only: bool, num_proc: int | None
    ) -> Documents:
        """The documents of a data set with images.

        Raises:
            InputError: a row cannot be trained on.
        """
        tokenizer = self.processor.tokenizer
        relabel = answers_of(tokenizer) if responses_only else None
        encode = VisionEncoder(
            tokenizer,
            self.tokens,
            self.make_images,
            max_length=max_length,
            overlong="shrink" if self.options.shrink_images else "truncate",
            image_folder=self.folder,
            responses_only=responses_only and relabel is None,
            relabel=relabel,
            skip_broken=self.options.skip_broken_images,
            config=self.config,
        )
        maker = ImageDocumentMaker(rows, encode, max_length, self.folder, self.keep_bytes)
        made = made_by(maker, num_proc)
        key = json.dumps([made.fingerprint, self._of_processor()], sort_keys=True)
        fingerprint = hashlib.sha256(key.encode()).hexdigest()
        return replace(made, fingerprint=fingerprint, unused_columns=unused_columns(rows))

    def beside(self, documents: Documents) -> Documents:
        """Documents of text, as those that stand beside documents with images.

        Raises:
            InputError: a text holds a token of images.
        """
        ids = self.token_ids.of_images
        start = 0
        for table in scan(documents.rows, ["input_ids"], _BATCH):
            for number, of_document in enumerate(table["input_ids"].combine_chunks(), start):
                if found := ids & {*of_document.values.to_pylist()}:
                    name = self.processor.tokenizer.convert_ids_to_tokens(found.pop())
                    raise InputError(
                        f"document {number}: the text holds {name}, a token of images of the model; take it "
                        "out of the text"
                    )
            start += len(table)
        return replace(documents, rows=without_images(documents.rows))

    def _of_processor(self) -> dict[str, Any]:
        """What the pixels of an image depend on."""
        return _plain(self.processor.image_processor.to_dict())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    if hasattr(value, "items"):
        return {name: _plain(inner) for name, inner in value.items()}
    return dict(value) if hasattr(value, "keys") else int(value)


def takes_images(model_name: str) -> bool:
    """Whether a model has a part that sees images."""
    return hasattr(load_config(resolve(model_name)[0]), "vision_config")


def image_preparation(
    model_name: str,
    tokenizer: Any,
    options: ImageOptions,
    rows: Iterable[Dataset],
    *,
    keep_bytes: bool = False,
) -> ImagePreparation | None:
    """How the images of some data sets are prepared; None where the model takes none, or they have none.

    Raises:
        InputError: images for this model are not prepared here, its processor cannot be loaded, or the
            tokenizer is not that of the model.
    """
    source = resolve(model_name)[0]
    config = load_config(source)
    if not hasattr(config, "vision_config") or not any(map(holds_images, rows)):
        return None
    return preparation_of(source, config, tokenizer, options, keep_bytes=keep_bytes)


def preparation_of(
    source: str, config: Any, tokenizer: Any, options: ImageOptions, *, keep_bytes: bool = False
) -> ImagePreparation:
    """How the images of a model are prepared.

    Args:
        source: folder or name of the base model.

    Raises:
        InputError: as `image_preparation`.
    """
    tokens = image_tokens_of(config)
    image_processor = load_image_processor(
        source, config=config, max_pixels=options.max_pixels, min_pixels=options.min_pixels
    )
    token_ids = ImageTokenIds.of(tokens, tokenizer, config)
    processor = processor_of(source, image_processor, tokenizer, tokens, config)
    return ImagePreparation(config, processor, tokens, token_ids, options, keep_bytes)
