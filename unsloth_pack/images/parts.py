"""The parts of a message: what is text, what is an image, and keys of either that are not what they seem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unsloth_pack.data.fields import KEYS_OF_IMAGES
from unsloth_pack.data.refusals import fail
from unsloth_pack.images.sources import OF_PARTS

_KEYS_OF_TEXT = ("text", "value")  # of a part of type text
_LIMITS = ("max_pixels", "min_pixels", "resized_height", "resized_width")  # of qwen-vl-utils, for one image


def without_nulls(part: dict[str, Any]) -> dict[str, Any]:
    """A part without nulls, which Arrow holds for each key that only other parts have."""
    return {key: value for key, value in part.items() if value is not None}


def hidden_image(part: Any) -> str | None:
    """The key under which a part that says it is text holds an image."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return None
    return next((key for key in KEYS_OF_IMAGES if not _is_nothing(part.get(key))), None)


def hide_images(turns: Any) -> bool:
    """Whether a part of a conversation is a text that holds an image."""
    return any(hidden_image(part) for part in _parts_of(turns))


def check_text(index: int, column: str, part: dict[str, Any]) -> None:
    """Refuse a text with an image, which nothing would show to the model.

    Raises:
        InputError: names the row, the column, the key and a remedy.
    """
    if key := hidden_image(part):
        remedy = "write the image as a part of its own, {'type': 'image', 'image': ...}"
        fail(index, column, f"a part of type 'text' with the key {key!r} of an image", part, remedy)


def image_in(index: int, column: str, part: dict[str, Any]) -> Any:
    """What a part names as its image, for `sources.source_of`; None where it names none.

    Args:
        part: of type image or image_url, without nulls.

    Raises:
        InputError: the part has a size of its own, or a text that nothing would show to the model.
    """
    if key := next((key for key in _KEYS_OF_TEXT if not _is_nothing(part.get(key))), None):
        remedy = "write the text as a part of its own, {'type': 'text', 'text': ...}"
        fail(index, column, f"a part of an image with the key {key!r} of a text", part, remedy)
    if limits := [key for key in _LIMITS if key in part]:
        remedy = (
            "take it out, and limit all images: --max_pixels and --min_pixels, or max_pixels and min_pixels "
            "of from_pretrained"
        )
        fail(index, column, f"an image with a limit of its own, {', '.join(limits)}", part, remedy)
    found = {key: part[key] for key in OF_PARTS if key in part}
    if len(found) == 1 and "base64" not in found:
        return next(iter(found.values()))
    return found or None


def unknown_keys(part: dict[str, Any]) -> list[str]:
    """The keys of a part of an image that say nothing here."""
    return [str(key) for key in part if key not in (*OF_PARTS, "type")]


def refuse_unknown(index: int, column: str, part: dict[str, Any], keys: list[str]) -> None:
    """Refuse a part of an image that names no image, and for which no column holds one.

    Raises:
        InputError: names the row, the column, the keys and those that are read.
    """
    problem = f"an image under none of {', '.join(OF_PARTS)}, but with {', '.join(keys)}"
    fail(index, column, problem, part, "give the image under one of them, or in the column images")


def _parts_of(turns: Any) -> Iterator[Any]:
    for turn in turns if isinstance(turns, list) else []:
        for key in ("content", "value") if isinstance(turn, dict) else ():
            yield from turn[key] if isinstance(turn.get(key), list) else []


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes | list | tuple | dict) and len(value) == 0)
