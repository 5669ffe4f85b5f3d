"""Parse a row's images, and its conversation as text with `<image>` for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from unsloth_pack.data import rows
from unsloth_pack.data.columns import IMAGE_COLUMNS, refuse_acting_values
from unsloth_pack.data.rows import KEYS_OF_IMAGES, Message, fail
from unsloth_pack.images.reading import PART_KEYS, ImageSource, parse_source

MARK = "<image>"  # of LLaVA, LLaMA-Factory and ms-swift, in text
_OTHER_MARKS = ("<video>", "<audio>")  # of the same tools
_OTHER_MEDIA = ("video", "videos", "audio", "audios")
# Keys of an image that the model would never see: a text, or a limit as qwen-vl-utils takes it
_UNSEEN = ("text", "value", "max_pixels", "min_pixels", "resized_height", "resized_width")


@dataclass(frozen=True, eq=False)
class ImageRow:
    """A row with its images."""

    index: int  # of the row, for errors
    column: str  # of the conversation
    n_prompt: int  # turns of a prompt that is separate from its completion; else 0
    turns: list[Message]  # with one text each, in which `MARK` stands for an image
    beside: dict[str, Any]  # further inputs of the chat template: `tools` and `chat_template_kwargs`
    images: list[ImageSource]  # in the order of their marks


def image_row(
    index: int, row: object, folder: Path | None, learned: Mapping[str, bool], reserved: Sequence[str] = ()
) -> ImageRow:
    """Parse and check the conversation of a row and its images.

    Images are in the parts of a message, or in the column `images` or `image`, with a part `{"type":
    "image"}` or the text `<image>` for the place of each. No turn may contain the `reserved` tokens.
    """
    if not isinstance(row, Mapping):
        fail(index, "messages", "expected a row with columns", row, "give rows with a column messages")
    for column in _OTHER_MEDIA:
        if row.get(column):
            fail(index, column, "video or sound, which is not trained here", row[column], "remove the row")
    refuse_acting_values(index, row)
    column, prompt, completion = _conversation(index, row)
    images = _RowImages(index, column, row, folder, reserved)
    marked = [images.mark_turn(turn) for turn in [*prompt, *completion]]
    images.check_used()
    checked = rows.messages(index, {column: marked}, column, learned)
    turns = rows.with_system(rows.optional_string(index, row, "system"), checked)
    n_prompt = len(prompt) and len(prompt) + len(turns) - len(checked)
    rows.check_turns(index, column, turns, n_prompt)
    beside = rows.tools(index, row) | rows.template_kwargs(index, row)
    return ImageRow(index, column, n_prompt, turns, beside, images.placed)


def with_parts(turns: list[Message], everywhere: bool = False) -> list[Message]:
    """Split texts with images, or all, into parts, for the chat templates of vision models."""

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
    for column in ("messages", "conversations"):
        if isinstance(row.get(column), list):
            return column, [], row[column]
        if row.get(column) is not None:
            fail(index, column, "expected a list of turns", row[column], "write it as one or remove the row")
    if row.get("instruction") is not None and "output" in row:
        texts = [rows.optional_string(index, row, name) for name in ("instruction", "input")]
        question = "\n".join(text for text in texts if text)
        answer = rows.string(index, row, "output")
        return "instruction", _turns("user", question), _turns("assistant", answer)
    answers = [row[name] for name in ("completion", "response") if row.get(name) is not None]
    if row.get("prompt") is not None and answers:
        return "prompt", _turns("user", row["prompt"]), _turns("assistant", answers[0])
    known = "messages, conversations, prompt and completion, or instruction and output"
    fail(index, "messages", "no conversation", sorted(map(str, row)), f"give the columns {known}")


def _turns(role: str, content: object) -> list[Any]:
    return content if isinstance(content, list) else [{"role": role, "content": content}]


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, str | bytes | list | tuple | dict) and len(value) == 0)


class _RowImages:
    """The images of a row, in the order of their places in its conversation."""

    def __init__(
        self,
        index: int,
        column: str,
        row: Mapping[str, object],
        folder: Path | None,
        reserved: Sequence[str],
    ):
        self._index, self._column, self._folder, self._reserved = index, column, folder, reserved
        values = {name: row[name] for name in IMAGE_COLUMNS if not _is_nothing(row.get(name))}
        if len(values) > 1:
            fail(index, "image", "images in two columns", values, "keep one")
        self._of_images, value = next(iter(values.items()), ("images", []))
        self._values = [*value] if isinstance(value, list | tuple) else [value]
        self._marks = 0
        self.placed: list[ImageSource] = []  # those of the turns so far

    def check_used(self) -> None:
        """Refuse marks without an image, and images without a mark."""
        if self._marks != len(self._values):
            problem = (
                f"places for images in column {self._column!r}: {self._marks}, images: {len(self._values)}"
            )
            remedy = f"write {MARK}, or a part {{'type': 'image'}}, where each image belongs"
            fail(self._index, self._of_images, problem, self._values, remedy)

    def mark_turn(self, turn: Any) -> Any:
        """Turn a turn's content into one text with marks. Others refuse what is no turn."""
        key = "content" if isinstance(turn, dict) and "role" in turn else "value"
        content = turn.get(key) if isinstance(turn, dict) else None
        if isinstance(content, list | tuple):
            content = "".join(map(self._mark_part, content))
        elif isinstance(content, str):
            self._take_marks(content)
        else:
            return turn
        for token in (*self._reserved, *_OTHER_MARKS):
            if token in content:
                problem = f"the text holds {token}, a token of the model, or of videos and sound"
                self._fail(problem, content, f"write {MARK} where an image belongs, or remove the row")
        if MARK in content and rows.role_of(turn.get("role", turn.get("from"))) == "assistant":
            remedy = "put images into the turns of the user, since a model writes none"
            self._fail("an image in a turn of the assistant", content, remedy)
        return turn | {key: content}

    def _mark_part(self, part: Any) -> str:
        """Return a part of a message as text, with `MARK` for an image."""
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if isinstance(part, dict):  # Arrow fills in nulls for keys of other parts
            part = {key: value for key, value in part.items() if value is not None}
        match part:
            case {"type": "text", "text": str(text)} | {"type": "text", "value": str(text)}:
                self._refuse_keys(part, KEYS_OF_IMAGES)
                self._take_marks(text)
                return text
            case {"type": "image"} | {"type": "image_url", "image_url": _}:
                self._refuse_keys(part, _UNSEEN)
                image = {key: part[key] for key in PART_KEYS if key in part}
                if not image:
                    self._take_marks(MARK)
                elif len(image) > 1 or "base64" in image:
                    self._place(self._column, image)
                else:
                    self._place(self._column, *image.values())
                return MARK
        remedy = "write parts as {'type': 'text', 'text': ...} and {'type': 'image', 'image': ...}"
        self._fail("a part of a message that is neither text nor an image", part, remedy)

    def _refuse_keys(self, part: dict[str, object], keys: Sequence[str]) -> None:
        if key := next((key for key in keys if not _is_nothing(part.get(key))), None):
            problem = f"a part of type {part['type']!r} with {key!r}, which the model would never see"
            self._fail(problem, part, "write it as a part of its own; max_pixels limits all images")

    def _take_marks(self, text: str) -> None:
        """Place the column's next image for each mark."""
        n_marks = text.count(MARK)
        for value in self._values[self._marks : self._marks + n_marks]:
            self._place(self._of_images, value)
        self._marks += n_marks

    def _place(self, column: str, value: object) -> None:
        self.placed.append(parse_source(self._index, column, value, self._folder))

    def _fail(self, problem: str, value: object, remedy: str) -> NoReturn:
        fail(self._index, self._column, problem, value, remedy)
