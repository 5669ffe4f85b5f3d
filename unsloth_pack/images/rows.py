"""Parse a row's images, and its conversation as text with `<image>` for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_pack.data import rows
from unsloth_pack.data.columns import IMAGE_COLUMNS, refuse_acting_values
from unsloth_pack.data.rows import KEYS_OF_IMAGES, Message, fail
from unsloth_pack.images.reading import PART_KEYS, ImageSource, parse_source

_KEYS_OF_TEXT = ("text", "value")  # of a part of type text
_LIMITS = ("max_pixels", "min_pixels", "resized_height", "resized_width")  # of qwen-vl-utils, for one image


def _find_hidden_image(part: Any) -> str | None:
    """Return the key of an image in a part of type text."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return None
    return next((key for key in KEYS_OF_IMAGES if not _is_nothing(part.get(key))), None)


def has_hidden_image(turns: Any) -> bool:
    """True if a part of type text has an image."""
    return any(map(_find_hidden_image, _parts_of(turns)))


def _check_text(index: int, column: str, part: dict[str, Any]) -> None:
    """Refuse a text with an image, which the model would never see."""
    if key := _find_hidden_image(part):
        remedy = "write the image as a part of its own, {'type': 'image', 'image': ...}"
        fail(index, column, f"a part of type 'text' with the key {key!r} of an image", part, remedy)


def _get_image(index: int, column: str, part: dict[str, Any]) -> Any:
    """Return a part's image for `parse_source`, or None.

    Args:
        part: of type image or image_url, without nulls.

    Raises:
        InputError: the part has a size of its own, or a text, which the model would never see.
    """
    if key := next((key for key in _KEYS_OF_TEXT if not _is_nothing(part.get(key))), None):
        remedy = "write the text as a part of its own, {'type': 'text', 'text': ...}"
        fail(index, column, f"a part of an image with the key {key!r} of a text", part, remedy)
    if limits := [key for key in _LIMITS if key in part]:
        options = "--max_pixels and --min_pixels, or max_pixels and min_pixels of from_pretrained"
        remedy = f"take it out, and limit all images: {options}"
        fail(index, column, f"an image with a limit of its own, {', '.join(limits)}", part, remedy)
    images = {key: part[key] for key in PART_KEYS if key in part}
    if len(images) == 1 and "base64" not in images:
        return next(iter(images.values()))
    return images or None


def _parts_of(turns: Any) -> Iterator[Any]:
    for turn in turns if isinstance(turns, list) else []:
        for key in ("content", "value") if isinstance(turn, dict) else ():
            yield from turn[key] if isinstance(turn.get(key), list) else []


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes | list | tuple | dict) and len(value) == 0)


MARK = "<image>"  # of LLaVA, LLaMA-Factory and ms-swift, in text
_OTHER_MARKS = ("<video>", "<audio>")  # of the same tools
_OTHER_MEDIA = ("video", "videos", "audio", "audios")
_CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True, eq=False)
class ImageRow:
    """A row with its images.

    Args:
        index: of the row, for errors.
        column: of the conversation.
        prompt: the turns of a prompt that is separate from its completion; else empty.
        turns: all turns with one text each, in which `MARK` stands for an image.
        beside: further inputs of the chat template: `tools` and `chat_template_kwargs`.
        images: in the order of their marks.
    """

    index: int
    column: str
    prompt: list[Message]
    turns: list[Message]
    beside: dict[str, Any]
    images: list[ImageSource]


def image_row(
    index: int, row: Any, folder: Path | None, learned: Mapping[str, bool], reserved: tuple[str, ...] = ()
) -> ImageRow:
    """Parse and check the conversation of a row and its images.

    Images are in the parts of a message, or in the column `images` or `image`, with a part `{"type":
    "image"}` or the text `<image>` for the place of each.

    Args:
        index: of the row, for errors.
        folder: the root of relative paths.
        learned: True for roles whose turns carry loss, see `data.turn_keys.check_keys`.
        reserved: the model's image tokens, which no turn may contain.

    Raises:
        InputError: names the row, the column, the value and a remedy.
    """
    if not isinstance(row, Mapping):
        fail(index, "messages", "expected a row with columns", row, "give rows with a column messages")
    for column in _OTHER_MEDIA:
        if row.get(column):
            fail(index, column, "video or sound, which is not trained here", row[column], "remove the row")
    refuse_acting_values(index, row)
    column, prompt, completion = _conversation(index, row)
    images = _ColumnImages(index, row, folder)
    marked = [_with_marks(index, column, turn, images, reserved) for turn in [*prompt, *completion]]
    images.check_used(column)
    n_prompt = len(prompt)
    checked = rows.messages(index, {column: marked}, column, learned)
    system = rows.optional_string(index, row, "system")
    turns = rows.with_system(system, checked)
    n_prompt += (len(turns) - len(checked)) if n_prompt else 0
    rows.check_order(index, column, turns)
    rows.check_answered(index, column, turns[n_prompt:])
    beside = rows.tools(index, row) | rows.template_kwargs(index, row)
    return ImageRow(index, column, turns[:n_prompt], turns, beside, images.placed)


def with_parts(turns: list[Message], everywhere: bool = False) -> list[Message]:
    """Split texts with images into parts, for the chat templates of vision models.

    Args:
        everywhere: split texts without images too.
    """

    def has_parts(text: str | None) -> bool:
        return bool(text) if everywhere else MARK in (text or "")

    return [
        turn | {"content": [*_split(turn["content"])]} if has_parts(turn.get("content")) else turn
        for turn in turns
    ]


def _split(text: str) -> Iterator[dict[str, str]]:
    for place, piece in enumerate(text.split(MARK)):
        if place:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _conversation(index: int, row: Mapping[str, Any]) -> tuple[str, list[Any], list[Any]]:
    """Return the conversation's column, the turns of its prompt, if any, and all others."""
    for column in _CONVERSATIONS:
        if isinstance(row.get(column), list):
            return column, [], row[column]
        if row.get(column) is not None:
            fail(index, column, "expected a list of turns", row[column], "write it as one or remove the row")
    if row.get("instruction") is not None and "output" in row:
        texts = [rows.optional_string(index, row, name) for name in ("instruction", "input")]
        question = "\n".join(text for text in texts if text)
        answer = rows.string(index, row, "output")
        return "instruction", [_turn("user", question)], [_turn("assistant", answer)]
    answer_column = "completion" if row.get("completion") is not None else "response"
    if row.get("prompt") is not None and row.get(answer_column) is not None:
        prompt, answer = row["prompt"], row[answer_column]
        prompt = prompt if isinstance(prompt, list) else [_turn("user", prompt)]
        return "prompt", prompt, answer if isinstance(answer, list) else [_turn("assistant", answer)]
    known = "messages, conversations, prompt and completion, or instruction and output"
    fail(index, "messages", "no conversation", sorted(map(str, row)), f"give the columns {known}")


def _turn(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


class _ColumnImages:
    """The images of a row's column, for its marks in order, and all placed images."""

    def __init__(self, index: int, row: Mapping[str, Any], folder: Path | None):
        self._index, self._folder = index, folder
        names = [name for name in IMAGE_COLUMNS if not _is_empty(row.get(name))]
        if len(names) > 1:
            fail(index, "image", "images in two columns", {name: row[name] for name in names}, "keep one")
        self._column = names[0] if names else "images"
        value = row.get(self._column)
        values = value if isinstance(value, list | tuple) else [value]
        self._values = [*values] if names else []
        self.placed: list[ImageSource] = []
        self._marks = 0

    @property
    def is_used_up(self) -> bool:
        """True if the column has no further image."""
        return self._marks >= len(self._values)

    def mark(self) -> None:
        """Place the column's next image."""
        if not self.is_used_up:
            self.add(self._column, self._values[self._marks])
        self._marks += 1

    def add(self, column: str, value: Any) -> None:
        """Place an image."""
        self.placed.append(parse_source(self._index, column, value, self._folder))

    def check_used(self, column: str) -> None:
        """Refuse marks without an image, and images without a mark."""
        if self._marks == len(self._values):
            return
        remedy = f"write {MARK}, or a part {{'type': 'image'}}, where each image belongs, and nowhere else"
        problem = f"places for images in column {column!r}: {self._marks}, images: {len(self._values)}"
        fail(self._index, self._column, problem, self._values, remedy)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and len(value) == 0)


def _with_marks(index: int, column: str, turn: Any, images: _ColumnImages, reserved: tuple[str, ...]) -> Any:
    """Turn a turn's content into one text with marks. Others refuse what is no turn."""
    key = "content" if isinstance(turn, dict) and "role" in turn else "value"
    content = turn.get(key) if isinstance(turn, dict) else None
    if isinstance(content, list | tuple):
        n_before = len(images.placed)
        content = "".join(_to_text(index, column, part, images) for part in content)
        has_images = len(images.placed) > n_before
    elif isinstance(content, str):
        has_images = _take_marks(content, images)
    else:
        return turn
    for token in reserved:
        if token in content:
            remedy = f"write {MARK} where an image belongs, or take the token out of the text"
            fail(index, column, f"the text holds {token}, a token of the model", content, remedy)
    for mark in _OTHER_MARKS:
        if mark in content:
            problem = f"the text holds {mark}; videos and sound are not trained on"
            remedy = "remove the row, or write the tag otherwise where the text is about it"
            fail(index, column, problem, content, remedy)
    is_answer = rows.role_of(turn.get("role", turn.get("from"))) == "assistant"
    if is_answer and (has_images or MARK in content):
        remedy = "put images into the turns of the user, since a model writes none"
        fail(index, column, "an image in a turn of the assistant", content, remedy)
    return turn | {key: content}


def _take_marks(text: str, images: _ColumnImages) -> bool:
    marks = text.count(MARK)
    for _ in range(marks):
        images.mark()
    return marks > 0


def _to_text(index: int, column: str, part: Any, images: _ColumnImages) -> str:
    """Return a part of a message as text, with `MARK` for an image."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if isinstance(part, dict):  # Arrow fills in nulls for keys of other parts
        part = {key: value for key, value in part.items() if value is not None}
        _check_text(index, column, part)
    match part:
        case {"type": "text", "text": str(text)} | {"type": "text", "value": str(text)}:
            _take_marks(text, images)
            return text
        case {"type": "image"} | {"type": "image_url", "image_url": _}:
            image = _get_image(index, column, part)
            if image is not None:
                images.add(column, image)
                return MARK
            unknown = [str(key) for key in part if key not in (*PART_KEYS, "type")]
            if images.is_used_up and unknown:
                problem = f"an image under none of {', '.join(PART_KEYS)}, but with {', '.join(unknown)}"
                fail(
                    index, column, problem, part, "give the image under one of them, or in the column images"
                )
            images.mark()
            return MARK
    remedy = "write parts as {'type': 'text', 'text': ...} and {'type': 'image', 'image': ...}"
    fail(index, column, "a part of a message that is neither text nor an image", part, remedy)
