"""`FastVisionModel`: load a model of vision and language, adapt its parts, train and generate."""

from collections.abc import Collection
from typing import Any, Literal

import torch

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.errors import InputError
from unsloth_pack.files.loading import resolve, split_config, take_file_options
from unsloth_pack.images.processor import (
    VisionProcessor,
    load_image_processor,
    processor_folder,
    processor_of,
)
from unsloth_pack.images.tokens import ImageTokenIds, image_tokens_of
from unsloth_pack.lora.vision_parts import Aligner, TrainedParts, vision_targets
from unsloth_pack.memory.checkpointing import CheckpointingMode
from unsloth_pack.modules.given import require_model

_HUB = ("token", "revision", "trust_remote_code")


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
        """A patched model and its processor.

        Args:
            model_name: "vision-demo" (bundled), a local folder of a model or of a saved adapter, or a hub
                name.
            max_seq_length, dtype, full_finetuning: as in `FastLanguageModel.from_pretrained`.
            load_in_4bit, load_in_8bit: of the language model. Tower, aligner and head stay in 16 bits.
            max_pixels, min_pixels: to which larger and smaller images are resized; None for the limits that
                the model, or the adapter, was saved with. Nothing else is resized. Only for Qwen-VL: the
                image processors of other families have limits of their own, which an error names.
            kwargs: further arguments of `FastLanguageModel.from_pretrained`.

        Returns:
            The model and a processor with `tokenizer` and `image_processor`, which needs no torchvision.

        Raises:
            UnsupportedArchitecture: no patch is declared for the language model.
            InputError: the model takes no images, or what `FastLanguageModel.from_pretrained` refuses.
        """
        source, _ = resolve(model_name)
        files = {name: kwargs[name] for name in kwargs if name in _HUB}
        files |= take_file_options(dict(kwargs))
        config, _ = split_config(source, **files)
        tokens = image_tokens_of(config)
        of_images = processor_folder(model_name)
        image_processor = load_image_processor(
            of_images, config=config, max_pixels=max_pixels, min_pixels=min_pixels, **files
        )
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name,
            max_seq_length=max_seq_length,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
            load_in_8bit=load_in_8bit,
            full_finetuning=full_finetuning,
            **kwargs,
        )
        ImageTokenIds(tokens, tokenizer, config)
        return model, processor_of(of_images, image_processor, tokenizer, tokens, config, **files)

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
        """The model with a LoRA adapter on the chosen parts, ready to train.

        Args:
            model: from `from_pretrained`, or one that `patch_model` has patched; without an adapter.
            target_modules: None or "all-linear" for the layers of the chosen parts. A pattern of whole paths
                chooses layers itself, and the flags of parts then mean nothing but for the aligner.
            finetune_vision_layers: an adapter on the tower, which is frozen by default.
            finetune_language_layers: an adapter on the language model.
            finetune_attention_modules, finetune_mlp_modules: which layers of these parts.
            finetune_aligner: what carries features of images into the language model: "full" trains it
                whole, as `modules_to_save`, "lora" puts an adapter on it, and False freezes it.
            modules_to_save: further modules to train whole.
            r, lora_alpha, lora_dropout, bias, use_gradient_checkpointing, random_state, kwargs: as in
                `FastLanguageModel.get_peft_model`.

        Raises:
            InputError: an argument is wrong, or nothing is left to train.
        """
        require_model(model, "give what from_pretrained returned first")
        trained = TrainedParts(
            finetune_vision_layers,
            finetune_language_layers,
            finetune_attention_modules,
            finetune_mlp_modules,
            finetune_aligner,
        )
        pattern, saved = vision_targets(model, trained)
        if target_modules not in (None, "all-linear"):
            if not isinstance(target_modules, str):
                raise InputError(
                    f"target_modules is {target_modules!r}, and names may also mean layers of the tower; "
                    "choose parts with finetune_*, or give a pattern of whole paths"
                )
            pattern = target_modules
        return FastLanguageModel.get_peft_model(
            model,
            r=r,
            target_modules=pattern,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            bias=bias,
            modules_to_save=[*dict.fromkeys([*saved, *(modules_to_save or ())])] or None,
            use_gradient_checkpointing=use_gradient_checkpointing,
            random_state=random_state,
            **kwargs,
        )

    @staticmethod
    def for_inference(model: Any) -> Any:
        """The model, ready to generate: no dropout, no recomputation, cache on."""
        return FastLanguageModel.for_inference(model)

    @staticmethod
    def for_training(model: Any) -> Any:
        """The model, ready to train again."""
        return FastLanguageModel.for_training(model)
