"""What `unsloth-pack generate` asks a model: a prompt, perhaps with images, as token ids and pixels."""

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError
from unsloth_pack.images.reading import pixels_of
from unsloth_pack.images.rows import MARK, with_parts
from unsloth_pack.images.sources import source_of
from unsloth_pack.images.tokens import ImageTokens


def encode(tokenizer: Any, prompt: str) -> Any:
    """A prompt for a model of text alone.

    Raises:
        InputError: it is no text.
    """
    _check_text(prompt)
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
        return pixels_of(source_of(0, "image", str(Path(file).absolute()), None))
    except InputError:  # its words are of a row of data
        raise InputError(f"--image is {file!r}, which cannot be read as an image; give another") from None


def encode_with_images(processor: Any, tokens: ImageTokens, prompt: str, images: list[Any]) -> Any:
    """A prompt for a model of vision and language.

    Args:
        prompt: `<image>` in it says where each image belongs. Without it they come before the text.

    Raises:
        InputError: there are other numbers of images and of `<image>`, the prompt holds one of the model's
            own image tokens, or it is no text.
    """
    _check_text(prompt)
    for token in tokens.texts:
        if token in prompt:
            raise InputError(f"the prompt holds {token}, a token of images; write {MARK}, and give --image")
    marks = prompt.count(MARK)
    if marks and marks != len(images):
        raise InputError(
            f"the prompt holds {marks} times {MARK}, and --image is given {len(images)} times; give one for "
            "each"
        )
    (turn,) = with_parts([{"role": "user", "content": prompt if marks else MARK * len(images) + prompt}])
    text = prompt
    if processor.chat_template:
        text = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    elif images:
        raise InputError("the model has no chat template, which puts images into a prompt; leave out --image")
    return processor(text=[text], images=images or None, return_tensors="pt")


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python's way to hold bytes of another encoding
        raise InputError(f"the prompt {reprlib.repr(prompt)} is not UTF-8; convert it") from None
