"""What `unsloth-pack generate` asks a model: a prompt, perhaps with images, as token ids and pixels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.reading import ImageSource, UnreadableImage, parse_source, read_pixels
from unsloth_pack.images.rows import MARK, with_parts
from unsloth_pack.images.tokens import IMAGE_TOKENS, ImageTokens


def encode(tokenizer: Any, prompt: str, model_type: str) -> Any:
    """A prompt without images.

    Raises:
        InputError: it holds what stands for an image to the model.
    """
    if (tokens := IMAGE_TOKENS.get(model_type)) is not None:
        _check_tokens(prompt, tokens)
        _check_marks(prompt, 0)
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def open_images(files: Sequence[str]) -> list[Any]:
    """The images of these files, in RGB.

    Raises:
        InputError: a file is not there, or holds no image.
    """
    return [_opened(file) for file in files]


def _opened(file: str) -> Any:
    if not Path(file).is_file():
        raise InputError(f"--image is {file!r}, which is no file; correct it")
    try:
        return read_pixels(parse_source(0, "image", str(Path(file).absolute()), None))
    except InputError:  # its words are of a row of data
        raise InputError(f"--image is {file!r}, which cannot be read as an image; give another") from None


def refuse_sizes(files: Sequence[str], images: Sequence[Any], make_images: ImageFamily) -> None:
    """Refuse images that the model's processor would refuse, as it does one that is far wider than high."""
    for file, image in zip(files, images, strict=True):
        source = ImageSource(0, "image", image)
        try:
            make_images.cut(source, (image.height, image.width), of_document=len(images))
        except UnreadableImage:  # its words are of a row of data
            raise InputError(
                f"--image is {file!r}, of {image.height} by {image.width} pixels, which the model's "
                "processor refuses; cut it, or give another"
            ) from None


def encode_with_images(processor: Any, tokens: ImageTokens, prompt: str, images: list[Any]) -> Any:
    """A prompt about images, of which there is one at least.

    Args:
        prompt: `<image>` in it says where each image belongs. Without it they come before the text.

    Raises:
        InputError: there are other numbers of images and of `<image>`, the prompt holds one of the model's
            own image tokens, or the model has no chat template.
    """
    _check_tokens(prompt, tokens)
    _check_marks(prompt, len(images))
    if not processor.chat_template:
        raise InputError("the model has no chat template, which puts images into a prompt; leave out --image")
    text = prompt if MARK in prompt else MARK * len(images) + prompt
    (turn,) = with_parts([{"role": "user", "content": text}])
    waiting = iter(images)
    turn["content"] = [
        part | {"image": next(waiting)} if part["type"] == "image" else part for part in turn["content"]
    ]
    return processor.apply_chat_template(
        [turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def _check_tokens(prompt: str, tokens: ImageTokens) -> None:
    for token in tokens.texts:
        if token in prompt:
            raise InputError(f"the prompt holds {token}, a token of images; write {MARK}, and give --image")


def _check_marks(prompt: str, n_images: int) -> None:
    marks = prompt.count(MARK)
    if marks and marks != n_images:
        raise InputError(
            f"the prompt holds {marks} times {MARK}, and --image is given {n_images} times; give one for each"
        )
