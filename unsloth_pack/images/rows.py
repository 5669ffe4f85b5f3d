"""The images of a row, and its conversation as text in which `<image>` stands for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_pack.data import rows
from unsloth_pack.data.columns import IMAGE_COLUMNS
from unsloth_pack.data.rows import KEYS_OF_IMAGES, Message, fail
from unsloth_pack.data.unsupported_columns import refuse_acting_values
from unsloth_pack.images.reading import OF_PARTS, ImageSource, source_of

# The parts of a message: what is text, what is an image, and keys of either that are not what they seem.

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


MARK = "<image>"  # of LLaVA, LLaMA-Factory and ms-swift, in text
_OTHER_MARKS = ("<video>", "<audio>")  # which stand for what the same tools take beside images
_OTHER_MEDIA = ("video", "videos", "audio", "audios")
_CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True, eq=False)
class ImageRow:
    """A row with its images.

    Args:
        index: of the row, by which errors name it.
        column: that the conversation is in.
        prompt: the turns of the prompt, where the row has one apart from its completion; else empty.
        turns: all turns, their content one text each, in which `MARK` stands for an image.
        beside: what the chat template reads beside the turns: `tools` and `chat_template_kwargs`.
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
    """The conversation of a row and its images, checked.

    Images stand in the parts of a message, or in the column `images` or `image` where a part
    `{"type": "image"}` or the text `<image>` says where each belongs.

    Args:
        index: of the row, by which errors name it.
        folder: where relative paths begin.
        learned: whether the turns of a role carry loss, as `data.turn_keys.check_keys` takes it.
        reserved: texts of tokens that stand for images, which no turn may hold.

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
    waiting = _Waiting(index, row, folder)
    marked = [_without_images(index, column, turn, waiting, reserved) for turn in [*prompt, *completion]]
    waiting.check_used(column)
    n_prompt = len(prompt)
    checked = rows.messages(index, {column: marked}, column, learned)
    system = rows.optional_string(index, row, "system")
    turns = rows.with_system(system, checked)
    n_prompt += (len(turns) - len(checked)) if n_prompt else 0
    rows.check_order(index, column, turns)
    rows.check_answered(index, column, turns[n_prompt:])
    beside = rows.tools(index, row) | rows.template_kwargs(index, row)
    return ImageRow(index, column, turns[:n_prompt], turns, beside, waiting.found)


def with_parts(turns: list[Message], everywhere: bool = False) -> list[Message]:
    """The turns as chat templates of vision models read them: the parts of a text with images apart.

    Args:
        everywhere: texts without images too become a list of parts.
    """

    def is_apart(text: str | None) -> bool:
        return bool(text) if everywhere else MARK in (text or "")

    return [
        turn | {"content": [*_parts(turn["content"])]} if is_apart(turn.get("content")) else turn
        for turn in turns
    ]


def _parts(text: str) -> Iterator[dict[str, str]]:
    for place, piece in enumerate(text.split(MARK)):
        if place:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _conversation(index: int, row: Mapping[str, Any]) -> tuple[str, list[Any], list[Any]]:
    """The column of a conversation, the turns of its prompt (which may be none), and all others."""
    for column in _CONVERSATIONS:
        if isinstance(row.get(column), list):
            return column, [], row[column]
        if row.get(column) is not None:
            fail(index, column, "expected a list of turns", row[column], "write it as one or remove the row")
    if row.get("instruction") is not None and "output" in row:
        texts = [rows.optional_string(index, row, name) for name in ("instruction", "input")]
        asked = "\n".join(text for text in texts if text)
        answer = rows.string(index, row, "output")
        return "instruction", [_turn("user", asked)], [_turn("assistant", answer)]
    answer_column = "completion" if row.get("completion") is not None else "response"
    if row.get("prompt") is not None and row.get(answer_column) is not None:
        prompt, answer = row["prompt"], row[answer_column]
        prompt = prompt if isinstance(prompt, list) else [_turn("user", prompt)]
        return "prompt", prompt, answer if isinstance(answer, list) else [_turn("assistant", answer)]
    known = "messages, conversations, prompt and completion, or instruction and output"
    fail(index, "messages", "no conversation", sorted(map(str, row)), f"give the columns {known}")


def _turn(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


class _Waiting:
    """The images of a row's column, which its marks take in their order, and those that were found."""

    def __init__(self, index: int, row: Mapping[str, Any], folder: Path | None):
        self._index, self._folder = index, folder
        given = [name for name in IMAGE_COLUMNS if not _is_empty(row.get(name))]
        if len(given) > 1:
            fail(index, "image", "images in two columns", {name: row[name] for name in given}, "keep one")
        self._column = given[0] if given else "images"
        value = row.get(self._column)
        values = value if isinstance(value, list | tuple) else [value]
        self._values = [*values] if given else []
        self.found: list[ImageSource] = []
        self._marks = 0

    @property
    def is_used_up(self) -> bool:
        """Whether the column has no image for a further place."""
        return self._marks >= len(self._values)

    def mark(self) -> None:
        """A place in the text takes the next image of the column."""
        if self._marks < len(self._values):
            self.add(self._column, self._values[self._marks])
        self._marks += 1

    def add(self, column: str, value: Any) -> None:
        """An image that stands where it belongs."""
        self.found.append(source_of(self._index, column, value, self._folder))

    def check_used(self, column: str) -> None:
        """Refuse marks without an image, and images without a mark."""
        if self._marks == len(self._values):
            return
        remedy = f"write {MARK}, or a part {{'type': 'image'}}, where each image belongs, and nowhere else"
        problem = f"places for images in column {column!r}: {self._marks}, images: {len(self._values)}"
        fail(self._index, self._column, problem, self._values, remedy)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and len(value) == 0)


def _without_images(index: int, column: str, turn: Any, waiting: _Waiting, reserved: tuple[str, ...]) -> Any:
    """A turn whose content is one text with marks. What is no turn stays, for others to refuse."""
    key = "content" if isinstance(turn, dict) and "role" in turn else "value"
    content = turn.get(key) if isinstance(turn, dict) else None
    if isinstance(content, list | tuple):
        found_before = len(waiting.found)
        content = "".join(_text_of(index, column, part, waiting) for part in content)
        has_images = len(waiting.found) > found_before
    elif isinstance(content, str):
        has_images = _take_marks(content, waiting)
    else:
        return turn
    for token in reserved:
        if token in content:
            remedy = f"write {MARK} where an image belongs, or take the token out of the text"
            fail(index, column, f"the text holds {token}, a token of the model", content, remedy)
    for mark in _OTHER_MARKS:
        if mark in content:
            remedy = "remove the row, or write the tag otherwise where the text is about it"
            fail(
                index, column, f"the text holds {mark}; videos and sound are not trained on", content, remedy
            )
    if (has_images or MARK in content) and _is_answer(turn):
        remedy = "put images into the turns of the user, since a model writes none"
        fail(index, column, "an image in a turn of the assistant", content, remedy)
    return turn | {key: content}


def _is_answer(turn: dict[str, Any]) -> bool:
    return rows.role_of(turn.get("role", turn.get("from"))) == "assistant"


def _take_marks(text: str, waiting: _Waiting) -> bool:
    marks = text.count(MARK)
    for _ in range(marks):
        waiting.mark()
    return marks > 0


def _text_of(index: int, column: str, part: Any, waiting: _Waiting) -> str:
    """One part of a message as text, `MARK` for an image."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if isinstance(part, dict):
        part = without_nulls(part)
        check_text(index, column, part)
    match part:
        case {"type": "text", "text": str(text)} | {"type": "text", "value": str(text)}:
            _take_marks(text, waiting)
            return text
        case {"type": "image"} | {"type": "image_url", "image_url": _}:
            image = image_in(index, column, part)
            if image is not None:
                waiting.add(column, image)
            else:
                if waiting.is_used_up and (unknown := unknown_keys(part)):
                    refuse_unknown(index, column, part, unknown)
                waiting.mark()
            return MARK
    remedy = "write parts as {'type': 'text', 'text': ...} and {'type': 'image', 'image': ...}"
    fail(index, column, "a part of a message that is neither text nor an image", part, remedy)
