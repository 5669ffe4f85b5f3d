"""`VisionDataCollator`: a batch of conversations with images as one packed row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unsloth_pack.chat_templates.answer_labels import AnswerLabels
from unsloth_pack.chat_templates.by_name import parts_of
from unsloth_pack.data.encoding import IGNORE_INDEX, marks_answers
from unsloth_pack.errors import InputError
from unsloth_pack.forwards.image_arguments import PIXELS
from unsloth_pack.forwards.vision_lm import FastVisionLM
from unsloth_pack.images.documents import (
    Overlong,
    PlacedImage,
    Relabel,
    VisionCounts,
    VisionDocument,
    VisionEncoder,
)
from unsloth_pack.images.families import image_maker
from unsloth_pack.images.sources import UnreadableImage
from unsloth_pack.images.tokens import image_tokens_of
from unsloth_pack.row.from_call import with_axes
from unsloth_pack.row.images import RowImages
from unsloth_pack.row.packed_row import PackedRow

# Unsloth's further arguments: the values that ask for nothing else, and what to do instead of any other
_OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "resize": ((None,), "give max_pixels to FastVisionModel.from_pretrained; nothing else is resized"),
    "resize_dimension": ((None, 0), "give max_pixels to FastVisionModel.from_pretrained"),
    "snap_to_patch_size": ((None, False), "the processor chooses sizes that patches fill; leave it out"),
    "ignore_index": ((IGNORE_INDEX,), "labels that do not count are -100; leave it out"),
    "force_match": ((True, False), ""),
    "num_proc": ((None,), "give dataloader_num_workers to the trainer"),
    "completion_only_loss": ((True, None), "write the rows as messages, in which all turns count"),
    "pad_to_multiple_of": ((None,), "a packed row has no padding; leave it out"),
    "last_response_only": ((False, None), "every answer counts; leave it out"),
}


class VisionDataCollator:
    """Makes one packed row of a batch of conversations with images. Works with any trainer.

    ```python
    args = SFTConfig(remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True})
    SFTTrainer(model, args, train_dataset=rows, data_collator=VisionDataCollator(model, processor))
    ```

    The batch holds, T tokens long:

    - `input_ids`, `labels`: `[1, T]`. The first label of every document is -100, and so are those of images,
      of their markers, and of what the chat template or the answers leave out.
    - `position_ids`: `[1, T]`, which count from 0 in every document; `[4, 1, T]` for Qwen-VL, whose further
      rows are positions in time, height and width.
    - `packed_seq_lengths`: the length of every document, a list on the host.
    - `pixel_values` float32 and what describes them, if there is an image; see `docs/vision.md`.
    - `packed_row` for a patched model: the whole description, so that nothing of it is read back from a GPU.
      What describes images is then lists. Make a new collator after `undo()`.

    Args:
        model: that the batches are for, patched already if it is to be; its configuration is read.
        processor: with `tokenizer` and `image_processor`, as `FastVisionModel.from_pretrained` returns it.
        max_seq_length: tokens of the longest document, images expanded; None for no limit.
        formatting_func: makes the row to be trained of each example.
        train_on_responses_only: only answers count in the loss.
        instruction_part, response_part: what the chat template puts before a question and before an answer.
            They may be left out where the template marks answers itself.
        image_folder: where relative paths begin, and out of which none may lead.
        overlong: of a document above `max_seq_length`: "error" refuses it, "truncate" cuts it behind its
            last image, "drop" leaves it out, "shrink" makes its images smaller where the processor can.
        skip_broken_images: leave out rows with an image that cannot be read; `counts` counts them.
        others: Unsloth's further arguments, taken where they ask for nothing.

    Attributes:
        counts: what became of the rows that this process has seen.

    Raises:
        InputError: an argument is wrong, or the processor is not that of the model.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        max_seq_length: int | None = None,
        formatting_func: Callable[[Any], Any] | None = None,
        *,
        train_on_responses_only: bool = False,
        instruction_part: str | None = None,
        response_part: str | None = None,
        image_folder: str | Path | None = None,
        overlong: Overlong = "error",
        skip_broken_images: bool = False,
        **others: Any,
    ):
        _take_others(others)
        tokenizer, image_processor = _parts_of_processor(processor)
        config = getattr(model, "config", model)
        tokens = image_tokens_of(config)
        self._make_patches = image_maker(config, image_processor)
        relabel = None
        if train_on_responses_only:
            relabel = _answers(tokenizer, instruction_part, response_part)
        self._format, self._is_patched = formatting_func, _is_patched(model)
        self._encode = VisionEncoder(
            tokenizer,
            tokens,
            self._make_patches,
            max_length=max_seq_length,
            overlong=overlong,
            image_folder=image_folder,
            responses_only=train_on_responses_only and relabel is None,
            relabel=relabel,
            skip_broken=skip_broken_images,
            config=config,
        )
        self._image_ids = self._encode.token_ids
        self._skip_broken = skip_broken_images

    @property
    def counts(self) -> VisionCounts:
        """What became of the rows; in a loader with workers each has its own."""
        return self._encode.counts

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """The packed row of some examples.

        Raises:
            InputError: an example cannot be trained on, by its place in the batch; or none is left.
        """
        rows = examples if self._format is None else [self._format(example) for example in examples]
        try:
            documents = [*self._with_images(self._encode(rows))]
        except UnreadableImage as error:
            raise UnreadableImage(f"in a batch, {error}") from None
        except InputError as error:
            raise InputError(f"in a batch, {error}") from None
        if not documents:
            raise InputError(
                f"a batch of {len(rows)} rows has no document left ({self.counts}); give larger batches, or "
                "remove the rows that do not fit before training"
            )
        return self._packed(documents)

    def _with_images(self, documents: list[VisionDocument]) -> Iterator[tuple[VisionDocument, list[Any]]]:
        for document in documents:
            try:
                yield document, [self._made(document, image) for image in document.images]
            except UnreadableImage:
                if not self._skip_broken:
                    raise
                self._encode.forget(document)

    def _made(self, document: VisionDocument, image: PlacedImage) -> Any:
        made = self._make_patches(image.source, image.most_pixels, image.of_document)
        cut = self._make_patches.cut_of(made)
        if cut != image.cut:
            found = self._image_ids.n_written(cut)
            raise UnreadableImage(
                f"row {document.index}, column {image.source.column!r}: {image.source.shown} has {found} "
                f"tokens, and its header said {image.tokens}; let nothing change it, or remove the row"
            )
        return made

    def _packed(self, documents: list[tuple[VisionDocument, list[Any]]]) -> dict[str, Any]:
        lengths = tuple(len(document.ids) for document, _ in documents)
        row = PackedRow.of_lengths(lengths, torch.device("cpu"))
        ids = np.concatenate([document.ids for document, _ in documents])
        labels = np.concatenate([document.labels for document, _ in documents])
        labels[row.starts] = IGNORE_INDEX
        images = [image for _, of_document in documents for image in of_document]
        axes = self._axes(row, ids, images)
        positions = row.positions[None] if axes is None else np.stack([row.positions, *axes])[:, None]
        batch: dict[str, Any] = {
            "input_ids": _row(ids),
            "labels": _row(labels),
            "position_ids": torch.from_numpy(positions),
            "packed_seq_lengths": list(lengths),
        }
        if images:
            by_document = [len(of_document) for _, of_document in documents]
            batch |= self._make_patches.arguments(images, by_document)
        return self._left_on_host(batch, row, axes) if self._is_patched else batch

    def _axes(self, row: PackedRow, ids: np.ndarray, images: list[Any]) -> np.ndarray | None:
        """`[3, T]`, where images have positions on three axes."""
        grids = self._make_patches.grids(images)
        if grids is None:
            return None
        is_placeholder = ids == self._image_ids.placeholder
        return RowImages.of(is_placeholder, grids.prod(axis=1), row).axes(row, grids)

    def _left_on_host(self, batch: dict[str, Any], row: PackedRow, axes: np.ndarray | None) -> dict[str, Any]:
        """The batch with all that describes it as objects, which a trainer sends to no device."""
        pixels = batch.get(PIXELS)
        if pixels is not None:
            is_placeholder = batch["input_ids"][0].numpy() == self._image_ids.placeholder
            row = replace(row, visual=np.flatnonzero(is_placeholder), _built={})
        batch["packed_row"] = row if axes is None else with_axes(row, axes)
        described = self._make_patches.described
        return batch | {name: batch[name].tolist() for name in described if name in batch}


UnslothVisionDataCollator = VisionDataCollator  # as Unsloth's notebooks call it


def _is_patched(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(isinstance(part, FastVisionLM) for part in model.modules())


def _row(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))[None]


def _take_others(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in _OTHERS:
            raise InputError(f"VisionDataCollator does not know {name}={value!r}; correct the name")
        harmless, remedy = _OTHERS[name]
        if not any(value is one or value == one for one in harmless):
            raise InputError(f"{name} is {value!r}, which VisionDataCollator does not take; {remedy}")


def _parts_of_processor(processor: Any) -> tuple[Any, Any]:
    for name in ("tokenizer", "image_processor"):
        if not hasattr(processor, name):
            raise InputError(
                f"processor is a {type(processor).__name__}, which has no {name}; give what "
                "FastVisionModel.from_pretrained returns"
            )
    return processor.tokenizer, processor.image_processor


def _answers(tokenizer: Any, question: str | None, answer: str | None) -> Relabel | None:
    """Labels on what stands behind `answer`; None where the chat template marks answers itself."""
    if question is None and answer is None:
        if marks_answers(tokenizer.get_chat_template()):
            return None
        question, answer = parts_of(tokenizer) or (None, None)
    if not question or not answer:
        raise InputError(
            f"train_on_responses_only is set, instruction_part is {question!r} and response_part {answer!r}; "
            "give what the chat template puts before a question and before an answer"
        )
    labels = AnswerLabels(question, answer, tokenizer)
    return lambda ids, given: labels.of_row(ids.tolist(), given.tolist(), None)[0].astype(np.int32)
