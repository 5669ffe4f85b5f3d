"""What can be refused about images, and about the parts of a model of vision and language that train."""

import os
from collections.abc import Iterator
from typing import Any

from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.config.options import ImageOptions
from unsloth_pack.errors import InputError, at_once, written

_RATES = {"vit_lr": "freeze_vit", "aligner_lr": "freeze_aligner"}
_OF_THE_TEXT = ("target_modules", "layers_to_transform", "trainable_token_indices", "add_tokens")


def check_images_together(options: TrainOptions) -> Iterator[InputError]:
    """Refuse options of images that contradict each other, whatever the model."""
    images, adapter = options.images, options.adapter
    for rate, frozen in _RATES.items():
        if (value := getattr(images, rate)) is not None and getattr(images, frozen):
            yield InputError(
                f"{rate} is {value:g} and {frozen} is true, so that nothing learns at this rate; leave out "
                f"--{rate}, or give --{frozen} false",
                about=(rate, frozen),
            )
    if images.freeze_vit and images.freeze_aligner and images.freeze_llm:
        yield InputError(
            "freeze_vit, freeze_aligner and freeze_llm are true, which leaves nothing to train; set one of "
            "them to false",
            about=("freeze_vit", "freeze_aligner", "freeze_llm"),
        )
    if images.freeze_llm:
        for name in _OF_THE_TEXT:
            if (given := getattr(adapter, name)) is not None:
                yield InputError(
                    f"freeze_llm is true and {name} is {written(given)}, which is of the language model; "
                    "leave out one of them",
                    about=("freeze_llm", name),
                )
    yield from image_mistakes(images)


def image_mistakes(images: ImageOptions) -> Iterator[InputError]:
    """Refuse sizes that are no range, and a folder that is not there."""
    if images.min_pixels is not None and images.min_pixels > (images.max_pixels or images.min_pixels):
        yield InputError(
            f"min_pixels is {images.min_pixels} and max_pixels is {images.max_pixels}; give a range",
            about=("min_pixels", "max_pixels"),
        )
    if images.image_folder is not None and not os.path.isdir(images.image_folder):
        yield InputError(
            f"image_folder is {images.image_folder!r}, which is no folder; correct it", about="image_folder"
        )


def refuse_image_options(images: ImageOptions, why: str) -> None:
    """Refuse options of images where a run has none, all at once.

    Args:
        why: it has none.

    Raises:
        InputError: names the options that differ from their defaults.
    """
    given, defaults = flat(images), flat(ImageOptions())
    names = [name for name, value in given.items() if value != defaults[name]]
    at_once([lambda: [_left_out(name, given[name], why) for name in names]])


def _left_out(name: str, value: Any, why: str) -> InputError:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return InputError(f"{name} is {shown}, and {why}; leave out --{name}", about=name)


def check_run_with_images(options: TrainOptions) -> None:
    """Refuse what runs with images do not do.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    for name in ("fsdp", "deepspeed"):
        if (value := getattr(options.training, name)) is not None:
            raise InputError(
                f"{name} is {value!r} and the rows have images, but a process whose row has none would keep "
                f"the others waiting; leave out --{name}",
                about=name,
            )
