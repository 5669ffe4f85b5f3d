"""`VisionDataCollator`: a batch of conversations with images as one packed row."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from unsloth_pack.chat_templates.marked_answers import answers_of
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.errors import InputError
from unsloth_pack.forwards.image_arguments import PIXELS
from unsloth_pack.forwards.vision_lm import FastVisionLM
from unsloth_pack.images.decoded import decoded
from unsloth_pack.images.documents import (
    Overlong,
    PlacedImage,
    VisionCounts,
    VisionDocument,
    VisionEncoder,
)
from unsloth_pack.images.families import image_maker
from unsloth_pack.images.pictured_row import PicturedRow
from unsloth_pack.images.sources import UnreadableImage
from unsloth_pack.images.tokens import image_tokens_of
from unsloth_pack.models.vision_spec import TOKEN_TYPES

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
    - `position_ids`: `[1, T]`, which count from 0 in every document; `[4, 1, T]` for a Qwen-VL that is not
      patched, whose further rows are positions in time, height and width.
    - `packed_seq_lengths`: the length of every document, a list on the host.
    - `pixel_values` float32 and what describes them, if there is an image; see `docs/vision.md`.
    - `packed_row` for a patched model: the whole description, so that nothing of it is read back from a GPU.
      It has the positions on three axes. What describes images is then lists. Make a new collator after
      `undo()`.

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
        image_folder: str | os.PathLike[str] | None = None,
        overlong: Overlong = "error",
        skip_broken_images: bool = False,
        **others: Any,
    ):
        _take_others(others)
        _check_switches(
            train_on_responses_only=train_on_responses_only, skip_broken_images=skip_broken_images
        )
        _check_texts(instruction_part=instruction_part, response_part=response_part)
        if formatting_func is not None and not callable(formatting_func):
            raise InputError(
                f"formatting_func is {formatting_func!r}; give a function that makes the row of an example"
            )
        if not isinstance(image_folder, str | os.PathLike | None):
            raise InputError(f"image_folder is {image_folder!r}; give the path of a folder")
        tokenizer, image_processor = _parts_of_processor(processor)
        config = getattr(model, "config", model)
        if not hasattr(config, "model_type"):
            raise InputError(
                f"model is a {type(model).__name__}, which has no configuration; give what "
                "FastVisionModel.from_pretrained returns"
            )
        tokens = image_tokens_of(config)
        self._make_images = image_maker(config, image_processor)
        relabel = None
        if train_on_responses_only:
            relabel = answers_of(tokenizer, instruction_part, response_part)
        self._format, self._is_patched = formatting_func, _is_patched(model)
        self._encode = VisionEncoder(
            tokenizer,
            tokens,
            self._make_images,
            max_length=max_seq_length,
            overlong=overlong,
            image_folder=None if image_folder is None else Path(image_folder),
            responses_only=train_on_responses_only and relabel is None,
            relabel=relabel,
            skip_broken=skip_broken_images,
            config=config,
        )
        self._token_ids, self._skip_broken = self._encode.token_ids, skip_broken_images

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
                yield document, [self._made(image) for image in document.images]
            except UnreadableImage:
                if not self._skip_broken:
                    raise
                self._encode.forget(document)

    def _made(self, image: PlacedImage) -> Any:
        size = (image.height, image.width)
        return decoded(self._make_images, image.source, size, image.most_pixels, image.of_document)

    def _packed(self, documents: list[tuple[VisionDocument, list[Any]]]) -> dict[str, Any]:
        made = PicturedRow.of(
            [document.ids for document, _ in documents],
            [document.labels for document, _ in documents],
            [images for _, images in documents],
            self._token_ids.placeholder,
            self._make_images,
        )
        batch: dict[str, Any] = {
            "input_ids": made.ids,
            "labels": made.labels,
            # TRL's num_tokens is the second size of the positions, which counts tokens in `[1, T]` alone
            "position_ids": made.along_text if self._is_patched else made.position_ids,
            "packed_seq_lengths": list(made.row.lengths),
        }
        # A trainer sends no object to a device, so nothing that describes the row is read back from there
        batch |= made.on_host(self._make_images.described) if self._is_patched else made.arguments
        if self._make_images.both_ways and not self._is_patched:
            batch[TOKEN_TYPES] = (made.ids == self._token_ids.placeholder).int()
        if PIXELS in batch:
            batch[PIXELS] = self._make_images.normalised(batch[PIXELS])
        return batch | ({"packed_row": made.row} if self._is_patched else {})


UnslothVisionDataCollator = VisionDataCollator  # as Unsloth's notebooks call it


def _is_patched(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(isinstance(part, FastVisionLM) for part in model.modules())


def _check_switches(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}; give True or False")


def _check_texts(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, str | None):
            raise InputError(f"{name} is {value!r}; give the text that the chat template writes there")


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
