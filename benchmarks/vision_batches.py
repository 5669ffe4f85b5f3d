"""Batches of the ruler for images: one packed row for ours, padded documents for its peers.

Both kinds of batches get the number of an update, and hold the documents of that update.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from vision_shapes import Document

IGNORED = -100


@dataclass(frozen=True, eq=False)
class ReadyBatches:
    """Batches of documents and pixels that were made beforehand.

    Args:
        updates: the documents of each, with what `file_reader` has read of their images.
        make: the `ImageMaker` of the model.
        placeholder: the token that stands for images.
        padding: the token behind a shorter document.
        packs: one row of all documents, as `VisionDataCollator` makes it, else each padded to the longest.
    """

    updates: Sequence[Sequence[tuple[Any, list[Any]]]]
    make: Any
    placeholder: int
    padding: int
    packs: bool

    @classmethod
    def of(
        cls, updates: Sequence[Sequence[Document]], config: Any, processor: Any, packs: bool
    ) -> "ReadyBatches":
        """Encode all documents, and decode every file once."""
        from unsloth_pack.images.encoding import VisionEncoder
        from unsloth_pack.images.families import make_image_family

        make = make_image_family(config, processor.image_processor)
        encode = VisionEncoder(processor.tokenizer, config, make)
        read = file_reader(make)
        return cls(
            [
                [
                    (encoded, [read(image.source.content, image.of_document) for image in encoded.images])
                    for encoded in encode([{"messages": one.messages(one.jpegs())} for one in documents])
                ]
                for documents in updates
            ],
            make,
            encode.token_ids.placeholder,
            processor.tokenizer.pad_token_id,
            packs,
        )

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        import torch

        (example,) = examples
        documents = self.updates[example["update"]]
        ids, labels = ([getattr(one, name) for one, _ in documents] for name in ("ids", "labels"))
        images = [[made for made, _ in read] for _, read in documents]
        batch = self._packed(ids, labels, images) if self.packs else self._padded(ids, labels, images)
        if pixels := [values for _, read in documents for _, values in read]:
            batch["pixel_values"] = torch.cat(pixels)
        return batch

    def _packed(
        self, ids: list[np.ndarray], labels: list[np.ndarray], images: list[list[Any]]
    ) -> dict[str, Any]:
        from unsloth_pack.images.packed_rows import RowWithImages

        made = RowWithImages.pack(ids, labels, images, self.placeholder, self.make)
        return {
            "input_ids": made.ids,
            "labels": made.labels,
            "position_ids": made.position_ids,
            "packed_seq_lengths": list(made.row.lengths),
            "packed_row": made.row,
            **made.on_host(self.make.described),
        }

    def _padded(
        self, ids: list[np.ndarray], labels: list[np.ndarray], images: list[list[Any]]
    ) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "input_ids": _padded_rows(ids, self.padding),
            "labels": _padded_rows(labels, IGNORED),
            "attention_mask": _padded_rows([np.ones_like(row) for row in ids], 0),
        }
        batch |= token_types(batch["input_ids"], self.placeholder, self.make)
        every = [image for of_document in images for image in of_document]
        return batch | (self.make.arguments(every, [*map(len, images)]) if every else {})


def file_reader(make: Any) -> Callable[[bytes, int], tuple[Any, Any]]:
    """A function that reads a file for a document of so many images: what `make` makes of it, and its pixels.

    The pixels are bfloat16. Every file is read once.
    """
    from unsloth_pack.images.reading import ImageSource

    @cache
    def read(file: bytes, of_document: int) -> tuple[Any, Any]:
        made = make(ImageSource(0, "images", file), of_document=of_document)
        values = make.arguments([made], [of_document])["pixel_values"]
        return made, make.normalised(values).bfloat16()

    return read


def token_types(ids: Any, placeholder: int, make: Any) -> dict[str, Any]:
    """The argument by which transformers finds the images of a model whose positions have three axes."""
    has_axes = make.grids([]) is not None
    return {"mm_token_type_ids": (ids == placeholder).long()} if has_axes else {}


def _padded_rows(rows: Sequence[np.ndarray], value: int) -> Any:
    """`[documents, longest]` int64."""
    import torch

    tensors = [torch.from_numpy(row).long() for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


@dataclass(frozen=True, eq=False)
class DecodedBatches:
    """Batches from image files, by a peer's own collator.

    Args:
        token_ids: the `ImageTokenIds` of the model.
    """

    updates: Sequence[Sequence[Document]]
    collate: Any
    peer: str
    token_ids: Any

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        import torch

        (example,) = examples
        batch = self.collate([self._row(document) for document in self.updates[example["update"]]])
        if self.peer == "ours":
            return batch
        # TRL's collator leaves the tokens of images in the labels
        of_images = torch.tensor(sorted(self.token_ids.of_images))
        batch["labels"][torch.isin(batch["input_ids"], of_images)] = IGNORED
        return batch

    def _row(self, document: Document) -> dict[str, Any]:
        """In the form that the collator takes: ours takes files, the others a column of images.

        Unsloth's resizes images that stand in messages, but none of a column.
        """
        from PIL import Image

        files = document.jpegs()
        if self.peer == "ours":
            return {"messages": document.messages(files)}
        images = [Image.open(io.BytesIO(file)) for file in files]
        return {"messages": document.messages([None] * len(images)), "images": images}


def decoded_batches(
    peer: str, updates: Sequence[Sequence[Document]], model: Any, config: Any, processor: Any
) -> DecodedBatches:
    """Batches by what the peer's users make them of conversations with."""
    from unsloth_pack.images.tokens import ImageTokenIds

    if peer == "ours":
        from unsloth_pack import VisionDataCollator

        collate: Any = VisionDataCollator(model, processor)
    elif peer == "unsloth":
        from unsloth.trainer import UnslothVisionDataCollator

        collate = UnslothVisionDataCollator(model, processor, resize="max")
    else:
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        collate = DataCollatorForVisionLanguageModeling(processor)
    for documents in updates:  # the files are written now, not by the processes of the loader
        for document in documents:
            document.jpegs()
    return DecodedBatches(updates, collate, peer, ImageTokenIds(config, processor.tokenizer))
