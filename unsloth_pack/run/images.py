"""How a run prepares rows with images, and whether it has any."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from pyarrow import Table
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from unsloth_pack.chat_templates.answers import find_relabel
from unsloth_pack.checkpoints.loading import find_model, load_config
from unsloth_pack.config.options import ImageOptions
from unsloth_pack.data.cache import scan
from unsloth_pack.data.rows import IMAGES
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.data.tokenize import Documents, SpanMaker, key_of_tokenizer, made_by
from unsloth_pack.errors import InputError, written
from unsloth_pack.images.encoding import VisionEncoder
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.prepared import (
    ImageDocumentMaker,
    holds_images,
    image_document_schema,
    refuse_unmapped,
    source_from_record,
    unused_columns,
    without_images,
)
from unsloth_pack.images.processor import (
    VisionProcessor,
    build_processor,
    find_processor_folder,
    load_image_processor,
)
from unsloth_pack.images.reading import UnreadableImage
from unsloth_pack.images.tokens import IMAGE_TOKENS, ImageTokenIds
from unsloth_pack.packing import PackedImages, PackManifest
from unsloth_pack.training.image_rows import ImageRowCollator

_BATCH = 1000  # documents whose tokens or images are looked at at a time


@dataclass(frozen=True)
class ImageCounts:
    """The images of some documents.

    Args:
        vision_tokens: that they take.
        resized: images beyond the limits of pixels; None where the model's images have no such limits.
        rows_broken: rows left out since an image cannot be used.
    """

    images: int
    vision_tokens: int
    resized: int | None
    rows_broken: int


@dataclass(frozen=True, eq=False)
class ImagePreparation:
    """Makes documents of rows with images.

    Args:
        config: of the model.
        processor: its processor, with the limits that the options set.
        token_ids: that stand for images.
        options: how images are prepared.
        keep_bytes: documents hold the content of image files, instead of their paths.
    """

    config: PretrainedConfig
    processor: VisionProcessor
    token_ids: ImageTokenIds
    options: ImageOptions
    keep_bytes: bool = False

    @property
    def folder(self) -> Path | None:
        """Where the paths of images begin."""
        return None if self.options.image_folder is None else Path(self.options.image_folder)

    @property
    def make_images(self) -> ImageFamily:
        return make_image_family(self.config, self.processor.image_processor)

    def collator(self) -> ImageRowCollator:
        """What makes batches of the rows."""
        skip_broken = self.options.skip_broken_images
        return ImageRowCollator(self.make_images, self.token_ids, self.folder, skip_broken=skip_broken)

    def documents(
        self, rows: Dataset, max_length: int, responses_only: bool, num_proc: int | None
    ) -> Documents:
        """Make the documents of a data set with images.

        Those that are too long are cut behind their last image. Where that is not short enough nothing is
        left of them, and the ledger counts them.
        """
        encode = self.encoder(max_length, responses_only)
        settings = self._settings(max_length, responses_only)
        maker = ImageDocumentMaker(rows, encode, max_length, self.folder, self.keep_bytes, settings)
        documents = made_by(maker, num_proc)
        key = json.dumps([documents.fingerprint, self.processor_hash])
        fingerprint = hashlib.sha256(key.encode()).hexdigest()
        return replace(documents, fingerprint=fingerprint, unused_columns=self.unused_columns(rows))

    def unused_columns(self, rows: Dataset) -> tuple[str, ...]:
        """The columns and keys of turns that are in no document."""
        return unused_columns(rows, str(self.processor.tokenizer.chat_template))

    def encoder(self, max_length: int, responses_only: bool) -> VisionEncoder:
        """The encoder of rows, see `documents`."""
        if self.options.shrink_images and not self.make_images.shrinks:
            raise InputError(
                f"shrink_images is true, and images of model type {self.config.model_type!r} have no size to "
                "shrink them by; leave out --shrink_images, or raise --max_seq_length"
            )
        tokenizer = self.processor.tokenizer
        relabel = find_relabel(tokenizer) if responses_only else None
        return VisionEncoder(
            tokenizer,
            self.config,
            self.make_images,
            max_length=max_length,
            overlong="shrink" if self.options.shrink_images else "truncate",
            image_folder=self.folder,
            responses_only=responses_only,
            relabel=relabel,
            skip_broken=self.options.skip_broken_images,
            skip_overlong=True,
        )

    def _settings(self, max_length: int, responses_only: bool) -> list[Any] | None:
        """All that documents depend on beside rows and files; None where that cannot be told."""
        of_tokenizer = key_of_tokenizer(self.processor.tokenizer)
        if of_tokenizer is None:
            return None
        whole = self.config.to_json_string(use_diff=False)
        return [
            of_tokenizer,
            [max_length, responses_only, self.options.shrink_images, self.options.skip_broken_images],
            [hashlib.sha256(whole.encode()).hexdigest(), self.processor_hash, version("pillow")],
            None if self.folder is None else str(self.folder.resolve()),
        ]

    def beside(self, documents: Documents) -> Documents:
        """Give documents of text the columns of documents with images, and refuse tokens of images."""
        refuse_image_tokens(documents.rows, self.token_ids, "document")
        return replace(documents, rows=without_images(documents.rows))

    def counts(self, documents: Documents) -> ImageCounts:
        """How many images some documents have, and how many of them are resized."""
        limits, resized, vision_tokens, images = self.make_images.pixel_limits, 0, 0, 0
        for table in scan(documents.rows, [IMAGES], _BATCH):
            of_table = table[IMAGES].combine_chunks().flatten()
            height, width, tokens = (of_table.field(n).to_numpy() for n in ("height", "width", "tokens"))
            if limits is not None:
                pixels = height.astype(np.int64) * width
                resized += int(((pixels < limits[0]) | (pixels > limits[1])).sum())
            vision_tokens, images = vision_tokens + int(tokens.sum()), images + len(tokens)
        n_broken = documents.ledger.rows_broken
        return ImageCounts(images, vision_tokens, None if limits is None else resized, n_broken)

    @property
    def processor_hash(self) -> str:
        """SHA-256 of all that the pixels of an image depend on."""
        settings = self.processor.image_processor.to_dict()
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=dict).encode()).hexdigest()

    def packed(self, ledger: TokenLedger) -> PackedImages:
        """What the manifest of packs says of their images."""
        least, most = self.make_images.pixel_limits or (None, None)
        return PackedImages(
            images=ledger.images,
            vision_tokens=ledger.vision_tokens,
            are_paths=not self.keep_bytes,
            placeholder=self.token_ids.placeholder,
            least_pixels=least,
            most_pixels=most,
            processor=self.processor_hash,
        )


def refuse_image_tokens(
    rows: Dataset, token_ids: ImageTokenIds, what: str, remedy: str = "take it out of the text"
) -> None:
    """Refuse tokens that stand for images in rows that have none; names the first."""
    wanted, first = [*token_ids.of_images], 0
    for table in scan(rows, ["input_ids"], _BATCH):
        ids = table["input_ids"].combine_chunks()
        is_found = np.isin(ids.flatten().to_numpy(), wanted)
        if is_found.any():
            place = int(is_found.argmax())
            number = first + int(pc.list_parent_indices(ids)[place].as_py())
            raise InputError(
                f"{what} {number} holds token {ids.flatten()[place]}, which stands for an image, and has no "
                f"images; {remedy}"
            )
        first += len(table)


def image_ids_of(model_name: str, tokenizer: PreTrainedTokenizerBase) -> ImageTokenIds | None:
    """The tokens of a model that stand for images; None where it takes none that are prepared here."""
    config = load_config(find_model(model_name)[0])
    return ImageTokenIds(config, tokenizer) if config.model_type in IMAGE_TOKENS else None


def takes_images(model_name: str) -> bool:
    """Whether a model has a part that sees images."""
    return hasattr(load_config(find_model(model_name)[0]), "vision_config")


def image_preparation(
    model_name: str,
    tokenizer: PreTrainedTokenizerBase,
    options: ImageOptions,
    rows: Iterable[Dataset],
    packs: Mapping[Path, PackManifest] | None = None,
    *,
    keep_bytes: bool = False,
    are_expected: bool = False,
) -> ImagePreparation | None:
    """How the images of data sets, or of packs by their folders, are prepared; None where there are none.

    The processor of an adapter counts where it has one. If images are expected, later rows may have some.
    """
    config, source = load_config(find_model(model_name)[0]), find_processor_folder(model_name)
    takes_some, preparation = hasattr(config, "vision_config"), None
    for folder, manifest in (packs or {}).items():
        if manifest.images is not None:
            if not takes_some:
                raise InputError(
                    f"{folder} holds rows with images, and {model_name} takes none; give another model"
                )
            limited = options.model_copy(update=_limits_of_packs(manifest.images, options, folder))
            preparation = preparation_of(source, config, tokenizer, limited)
            own = (preparation.processor_hash, preparation.token_ids.placeholder)
            if (manifest.images.processor, manifest.images.placeholder) != own:
                raise InputError(
                    f"{folder}: packed for another image processor, that of "
                    f"{manifest.model_name or 'another model'}; pack the data anew"
                )
    have_some = are_expected
    for each in rows if takes_some else ():
        if holds_images(each):
            have_some = True
        else:
            refuse_unmapped(each)
    if takes_some and have_some and preparation is None:
        return preparation_of(source, config, tokenizer, options, keep_bytes)
    return preparation


def _limits_of_packs(images: PackedImages, options: ImageOptions, folder: Path) -> dict[str, int | None]:
    """The pixels of the images of packs, from which the options may not differ."""
    limits = {"min_pixels": images.least_pixels, "max_pixels": images.most_pixels}
    for name, value in {**limits, "shrink_images": None}.items():
        if (given := getattr(options, name)) not in (None, False, value):
            raise InputError(
                f"{name} is {written(given)}, and the images of {folder} are packed already; "
                f"leave out --{name}, or give it to `unsloth-pack pack`"
            )
    return limits


def preparation_of(
    source: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    options: ImageOptions,
    keep_bytes: bool = False,
) -> ImagePreparation:
    """How the images of a model are prepared, by the processor in the folder or of the name `source`."""
    image_processor = load_image_processor(source, config, options.max_pixels, options.min_pixels)
    token_ids = ImageTokenIds(config, tokenizer)
    processor = build_processor(source, image_processor, tokenizer, config)
    return ImagePreparation(config, processor, token_ids, options, keep_bytes)


def saved_with_model(
    tokenizer: PreTrainedTokenizerBase,
    images: ImagePreparation | None,
    options: ImageOptions,
    init_adapter: str | None,
) -> PreTrainedTokenizerBase | VisionProcessor:
    """The processor of a run on images, else the tokenizer, to save beside the model.

    A run on text that begins with an adapter keeps the processor of that adapter.
    """
    if images is None and init_adapter is not None and find_processor_folder(init_adapter) == init_adapter:
        config = load_config(find_model(init_adapter)[0])
        if config.model_type in IMAGE_TOKENS:
            images = preparation_of(init_adapter, config, tokenizer, options)
    return tokenizer if images is None else images.processor


def check_files_of_packs(packs: Path, rows: Dataset, preparation: ImagePreparation) -> None:
    """Refuse packs whose images are files that the image folder does not hold as they were packed.

    Where broken images are skipped, files may be missing or changed.
    """
    chunks = (chunk for table in scan(rows, [IMAGES], _BATCH) for chunk in table[IMAGES].chunks)
    for images in (chunk.flatten() for chunk in chunks):
        files = images.filter(images.field("path").is_valid()).to_pylist()  # without the bytes of others
        for image in {each["path"]: each for each in files}.values():
            try:
                source_from_record(image, preparation.folder)
            except InputError as error:
                if not (isinstance(error, UnreadableImage) and preparation.options.skip_broken_images):
                    raise InputError(f"{packs}: {error}") from None


class StreamedImageRows:
    """Makes documents of rows with images, see `data.streaming.StreamedImages`."""

    def __init__(self, images: ImagePreparation, max_length: int, responses_only: bool):
        self.schema = image_document_schema()
        self._images, self._max_length = images, max_length
        self._encode = images.encoder(max_length, responses_only)

    def are_in(self, rows: Dataset) -> bool:
        return holds_images(rows)

    def maker(self, rows: Dataset, numbers: range) -> SpanMaker:
        return ImageDocumentMaker(rows, self._encode, self._max_length, self._images.folder, numbers=numbers)

    def unused_columns(self, rows: Dataset) -> tuple[str, ...]:
        return self._images.unused_columns(rows)

    def beside(self, table: Table) -> Table:
        return without_images(Dataset(table)).data.table.cast(self.schema)
