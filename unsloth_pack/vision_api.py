"""`FastVisionModel`: load a model of vision and language, adapt its parts, train and generate."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.chat_templates.answers import find_relabel
from unsloth_pack.checkpoints.loading import find_model, split_config, take_file_options
from unsloth_pack.errors import InputError
from unsloth_pack.images.encoding import Overlong, VisionDocument, VisionEncoder
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.family import PreparedImage
from unsloth_pack.images.packed_rows import RowWithImages
from unsloth_pack.images.prepared import decoded
from unsloth_pack.images.processor import (
    VisionProcessor,
    build_processor,
    find_processor_folder,
    load_image_processor,
)
from unsloth_pack.images.reading import UnreadableImage
from unsloth_pack.images.tokens import ImageTokenIds
from unsloth_pack.layers.vision.vision_lm import PIXELS, FastVisionLM
from unsloth_pack.lora.trained_parts import Aligner, TrainedParts, vision_targets
from unsloth_pack.memory.checkpointing import CheckpointingMode
from unsloth_pack.models.spec import TOKEN_TYPES
from unsloth_pack.modules import require_model
from unsloth_pack.unsloth_arguments import COLLATING, take


class FastVisionModel:
    """Load a model of vision and language ready for packed training, and put an adapter on its parts.

    ```python
    model, processor = FastVisionModel.from_pretrained("path/of/a/qwen3-vl", max_pixels=512 * 512)
    model = FastVisionModel.get_peft_model(model, r=16)
    collator = VisionDataCollator(model, processor)
    ```
    """

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int = 2048,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, VisionProcessor]:
        """Load a patched model and its processor.

        Args:
            model_name: "vision-demo" (bundled), a folder of a model or of a saved adapter, or a hub name.
            max_seq_length, dtype, full_finetuning: as in `FastLanguageModel.from_pretrained`.
            load_in_4bit, load_in_8bit: of the language model. Tower, aligner and head stay in 16 bits.
            max_pixels, min_pixels: to which larger and smaller images are resized; None for the limits saved
                with the model or the adapter. Only for Qwen-VL.
            kwargs: further arguments of `FastLanguageModel.from_pretrained`.

        Returns:
            The model and a processor with `tokenizer` and `image_processor`, which needs no torchvision.

        Raises:
            UnsupportedArchitecture: no patch is declared for the language model.
            InputError: the model takes no images, or as `FastLanguageModel.from_pretrained`.
        """
        source, _ = find_model(model_name)
        names = ("token", "revision", "trust_remote_code")
        files = {name: kwargs[name] for name in names if name in kwargs} | take_file_options(dict(kwargs))
        config, _ = split_config(source, **files)
        image_source = find_processor_folder(model_name)
        image_processor = load_image_processor(image_source, config, max_pixels, min_pixels, **files)
        kwargs |= {"load_in_4bit": load_in_4bit, "load_in_8bit": load_in_8bit}
        kwargs["full_finetuning"] = full_finetuning
        model, tokenizer = FastLanguageModel.from_pretrained(model_name, max_seq_length, dtype, **kwargs)
        ImageTokenIds(config, tokenizer)  # refuses another tokenizer
        return model, build_processor(image_source, image_processor, tokenizer, config, **files)

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: str | Collection[str] | None = None,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: Literal["none", "all", "lora_only"] = "none",
        finetune_vision_layers: bool = False,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        finetune_aligner: Aligner = "full",
        modules_to_save: list[str] | None = None,
        use_gradient_checkpointing: CheckpointingMode = False,
        random_state: int = 3407,
        **kwargs: Any,
    ) -> Any:
        """Put a LoRA adapter on the chosen parts of the model, ready to train.

        Args:
            model: from `from_pretrained`, or one that `patch_model` has patched; without an adapter.
            target_modules: None or "all-linear" for the layers of the chosen parts; or a pattern of whole
                paths, with which only `finetune_aligner` counts of the flags.
            finetune_vision_layers: an adapter on the tower, which is frozen by default.
            finetune_language_layers: an adapter on the language model.
            finetune_attention_modules, finetune_mlp_modules: which layers of these parts.
            finetune_aligner: of the modules between tower and language model: "full" trains them whole, as
                `modules_to_save`, "lora" puts an adapter on them, and False freezes them.
            modules_to_save: further modules to train whole.
            r, lora_alpha, lora_dropout, bias, use_gradient_checkpointing, random_state, kwargs: as in
                `FastLanguageModel.get_peft_model`.

        Raises:
            InputError: an argument is wrong, or nothing is left to train.
        """
        require_model(model, "give what from_pretrained returned first")
        layers = finetune_vision_layers, finetune_language_layers
        modules = finetune_attention_modules, finetune_mlp_modules
        pattern, saved = vision_targets(model, TrainedParts(*layers, *modules, finetune_aligner))
        if target_modules not in (None, "all-linear"):
            if not isinstance(target_modules, str):
                raise InputError(
                    f"target_modules is {target_modules!r}, and names may also mean layers of the tower; "
                    "choose parts with finetune_*, or give a pattern of whole paths"
                )
            pattern = target_modules
        kwargs |= {"use_gradient_checkpointing": use_gradient_checkpointing, "random_state": random_state}
        kwargs["modules_to_save"] = [*dict.fromkeys([*saved, *(modules_to_save or ())])] or None
        return FastLanguageModel.get_peft_model(model, r, pattern, lora_alpha, lora_dropout, bias, **kwargs)

    for_inference = staticmethod(FastLanguageModel.for_inference)
    for_training = staticmethod(FastLanguageModel.for_training)


class VisionDataCollator:
    """Packs a batch of conversations with images into one row, for any trainer.

    ```python
    args = SFTConfig(remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True})
    SFTTrainer(model, args, train_dataset=rows, data_collator=VisionDataCollator(model, processor))
    ```

    The batch holds, T tokens long:

    - `input_ids`, `labels`: `[1, T]`. Labels are -100 at the first token of every document, at images and
      their markers, and at what is not learned.
    - `position_ids`: `[1, T]`, from 0 in every document; `[4, 1, T]` for a Qwen-VL that is not patched.
    - `packed_seq_lengths`: the length of every document, a list on the host.
    - `pixel_values` float32 and their description, if there is an image; see `docs/vision.md`.
    - `packed_row` for a patched model: the whole description, so that nothing is read back from a GPU; that
      of images is then lists. Make a new collator after `undo()`.

    Args:
        model: of the batches, patched already if it is to be; its configuration is read.
        processor: with `tokenizer` and `image_processor`, as `FastVisionModel.from_pretrained` returns it.
        max_seq_length: tokens of the longest document, images expanded; None for no limit.
        formatting_func: turns each example into a row to train on.
        train_on_responses_only: only answers count in the loss.
        instruction_part, response_part: how a chat template that marks no answers begins the turns.
        image_folder: where relative paths begin; none may lead out of it.
        overlong: for a longer document: "error" refuses it, "truncate" cuts it behind its last image, "drop"
            leaves it out, "shrink" makes its images smaller where the processor can.
        skip_broken_images: leave out rows with an image that cannot be read; `counts` counts them.
        others: Unsloth's further arguments, accepted where they change nothing.

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
        take(COLLATING, others, "VisionDataCollator")
        for name in ("tokenizer", "image_processor"):
            if not hasattr(processor, name):
                problem = f"processor is a {type(processor).__name__}, which has no {name}"
                raise InputError(f"{problem}; give what FastVisionModel.from_pretrained returns")
        config, tokenizer = getattr(model, "config", model), processor.tokenizer
        self._make_images = make_image_family(config, processor.image_processor)
        relabel = None
        if train_on_responses_only:
            relabel = find_relabel(tokenizer, instruction_part, response_part)
        self._format, parts = formatting_func, model.modules() if isinstance(model, nn.Module) else ()
        self._is_patched = any(isinstance(part, FastVisionLM) for part in parts)
        self._encode = VisionEncoder(
            tokenizer,
            config,
            self._make_images,
            max_length=max_seq_length,
            overlong=overlong,
            image_folder=image_folder,
            responses_only=train_on_responses_only,
            relabel=relabel,
            skip_broken=skip_broken_images,
        )
        self.counts = self._encode.counts  # in a loader each worker has its own
        self._token_ids, self._skip_broken = self._encode.token_ids, skip_broken_images

    def __call__(self, examples: Sequence[object]) -> dict[str, Any]:
        """Pack some examples into one row.

        Raises:
            InputError: an example cannot be trained on, by its place in the batch; or none is left.
        """
        rows = examples if self._format is None else [self._format(example) for example in examples]
        try:
            documents = [*self._prepare_images(self._encode(rows))]
        except InputError as error:
            raise type(error)(f"in a batch, {error}") from None
        if not documents:
            problem = f"a batch of {len(rows)} rows has no document left ({self.counts})"
            raise InputError(f"{problem}; give larger batches, or remove the rows that do not fit")
        make = self._make_images
        ids, labels = ([getattr(each, name) for each, _ in documents] for name in ("ids", "labels"))
        packed = RowWithImages.pack(
            ids, labels, [images for _, images in documents], self._token_ids.placeholder, make
        )
        batch: dict[str, Any] = {
            "input_ids": packed.ids,
            "labels": packed.labels,
            # TRL's num_tokens is the second size of the positions, which counts tokens in `[1, T]` alone
            "position_ids": packed.along_text if self._is_patched else packed.position_ids,
            "packed_seq_lengths": list(packed.row.lengths),
        }
        if self._is_patched:  # a trainer sends no object to a device: nothing is read back from there
            batch |= packed.on_host(make.described) | {"packed_row": packed.row}
        else:
            batch |= packed.arguments
            if make.both_ways:
                batch[TOKEN_TYPES] = (packed.ids == self._token_ids.placeholder).int()
        if PIXELS in batch:
            batch[PIXELS] = make.normalised(batch[PIXELS])
        return batch

    def _prepare_images(
        self, documents: Iterable[VisionDocument]
    ) -> Iterator[tuple[VisionDocument, list[PreparedImage]]]:
        for document in documents:
            try:
                images = [
                    decoded(self._make_images, i.source, (i.height, i.width), i.most_pixels, i.of_document)
                    for i in document.images
                ]
            except UnreadableImage:
                if not self._skip_broken:
                    raise
                self.counts.broken += 1
            else:
                self._encode.count(document)
                yield document, images


UnslothVisionDataCollator = VisionDataCollator  # the name in Unsloth's notebooks
