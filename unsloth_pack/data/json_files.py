"""Rows of json and jsonl files: a list of objects, one object a line, or an object around a list."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from unsloth_pack.data.columns import KNOWN_COLUMNS
from unsloth_pack.data.compressed import (
    BLOCK,
    PART,
    FilePart,
    Row,
    in_parts,
    opened,
    opened_text,
    plain_name,
    skip,
)
from unsloth_pack.data.rows import fail
from unsloth_pack.errors import InputError

_BLANKS = re.compile(r"[ \t\n\r]*")


def read_json(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a `.json` or `.jsonl` file: a list of objects, one object per line, or an object around a list.

    The content decides which, because people use both suffixes for all of these. An object around a list may
    have other keys too, but only one with a list of objects. An object with a column of a known format is
    itself a row. A file of this last kind is parsed as a whole.

    Raises:
        InputError: malformed JSON, or something other than objects.
    """
    path = part.path
    if is_json_lines(path):
        yield from _json_lines(part)
        return
    letter = _first_letter(path)
    if letter == "[":
        yield from in_parts(_checked_items(path, _list_items(path)))
    if letter in ("", "["):
        return
    document = parse_json(_whole(path), path, 1)
    rows = _unwrap(document, path) if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise InputError(
            f"{path}: expected a list of objects, got {reprlib.repr(rows)}; write [{{...}}, ...]"
        )
    yield [row for row, _ in _checked_items(path, ((row, 0) for row in rows))]


def parse_json(text: str, path: Path, line: int) -> Any:
    """Parse `text`, which starts at this line of the file."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        where = f"{path} line {line + error.lineno - 1}, column {error.colno}"
        near = text[max(0, error.pos - 10) : error.pos + 20]
        raise InputError(
            f"{where}: not valid JSON ({error.msg}) near {near!r}; correct or remove it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} line {line}: not valid JSON ({error}); correct or remove it") from None


def rows_of_lines(lines: Iterable[tuple[int, str]], part: FilePart) -> list[Row]:
    """Lines of JSON as rows. A line comes with its number in the part, from 0; blank ones are no rows.

    Raises:
        InputError: a line is no object; names its number in the file.
    """
    rows = []
    for number, line in lines:
        if line.strip():
            try:
                row = parse_json(line, part.path, 1)
                if not isinstance(row, dict):
                    raise InputError("expected an object")
            except InputError:
                _refuse_line(line, part, number)
            rows.append(row)
    return rows


def line_in_file(part: FilePart, number: int) -> int:
    """The number in the file, from 1, of a line of a part."""
    with opened(part.path) as file:
        return 1 + number + sum(data.count(b"\n") for data in _blocks(file, part.start))


def is_json_lines(path: Path) -> bool:
    """Whether a JSON file has one object a line, as its content tells."""
    if _first_letter(path) == "[":
        return False
    if plain_name(path).suffix.lower() == ".jsonl":
        return True
    with opened_text(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, ""), next(lines, "")
    try:
        return bool(second) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(part: FilePart) -> Iterator[list[Row]]:
    with opened(part.path) as file:
        skip(file, part.path, part.start)
        at, number = part.start, 0
        while at < part.end and (read := file.read(min(PART, part.end - at))):
            if at + len(read) < part.end:
                read += file.readline()
            text = read.decode("utf-8" if at else "utf-8-sig")
            # not splitlines(): U+2028 may stand inside a string
            yield rows_of_lines(enumerate(text.split("\n"), number), part)
            at, number = at + len(read), number + text.count("\n")


def _refuse_line(line: str, part: FilePart, number: int) -> None:
    """Raise the error of a line, with its number in the file."""
    number = line_in_file(part, number)
    row = parse_json(line, part.path, number)
    raise InputError(
        f"{part.path} line {number}: expected an object, got {reprlib.repr(row)}; write one {{...}} a line"
    )


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size and (data := file.read(min(BLOCK, size))):
        size -= len(data)
        yield data


def _first_letter(path: Path) -> str:
    with opened_text(path) as file:
        while text := file.read(BLOCK):
            if text := text.lstrip():
                return text[0]
    return ""


def _whole(path: Path) -> str:
    with opened_text(path) as file:
        return file.read()


def _behind_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()


def _list_items(path: Path) -> Iterator[tuple[Any, int]]:
    """The items of a JSON list with their lengths, parsed one by one as the file is read."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    with opened_text(path, newline="") as file:
        text, size = file.read(BLOCK), BLOCK
        at = _behind_blanks(text, 0) + 1
        is_first = True
        while True:
            try:
                begin = _behind_blanks(text, at)
                if not is_first and text[begin] == ",":
                    begin = _behind_blanks(text, begin + 1)
                elif is_first and text[begin] != "]":
                    pass
                elif text[begin] == "]" and not (text[begin + 1 :] + file.read()).strip(" \t\n\r"):
                    return
                else:
                    break
                item, end = decoder.raw_decode(text, begin)
                if end == len(text):  # a number may go on
                    raise IndexError
            except (ValueError, IndexError, RecursionError):
                more = file.read(size)
                if not more:
                    break
                text, at, size = text[at:] + more, 0, 2 * size
                continue
            yield item, end - begin
            at, is_first = end, False
            if at > BLOCK:
                text, at, size = text[at:], 0, BLOCK
    parse_json(_whole(path), path, 1)  # has the place of the error
    raise InputError(f"{path}: not valid JSON; correct it")


def _checked_items(path: Path, items: Iterable[tuple[Any, int]]) -> Iterator[tuple[Row, int]]:
    for index, (row, size) in enumerate(items):
        if not isinstance(row, dict):
            raise InputError(
                f"{path}: expected a list of objects, got {reprlib.repr(row)} as item {index}; "
                "write [{...}, ...]"
            )
        yield row, size


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return row


def _unwrap(document: Row, path: Path) -> list[Row]:
    if KNOWN_COLUMNS & document.keys():
        return [document]
    lists = [
        key
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ]
    if len(lists) != 1:
        raise InputError(
            f"{path}: an object in which {len(lists)} of the keys {reprlib.repr(list(document))} hold a list "
            "of objects; write a list of objects, or an object with one such list"
        )
    return document[lists[0]]


# Objects as Arrow's struct type holds them: with null for every key that only other rows have.
#
# Parquet files and `datasets` use that type, which cannot tell a null from an absent key. Here null means an
# absent key, as it does to transformers in a turn. Where users choose the keys, as in the arguments of a
# call,
# either meaning could be wrong: such a null is refused.

_CHOSEN_KEYS = {"arguments", "parameters", "chat_template_kwargs"}  # the objects whose keys users choose


def holds_objects(feature: Any) -> bool:
    """Whether a column of this `datasets` type holds structs."""
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, dict) or (inner is not None and holds_objects(inner))


def without_absent_keys(index: int, column: str, feature: Any, value: Any) -> Any:
    """The value of row `index` without the keys that are null.

    Args:
        feature: the `datasets` type of the column.

    Raises:
        InputError: a null that might have been meant.
    """

    def settled(feature: Any, inner: Any, path: tuple[str, ...]) -> Any:
        if isinstance(feature, dict) and isinstance(inner, dict):
            kept = {}
            for key, item in inner.items():
                if item is None and _CHOSEN_KEYS.intersection(path):
                    refuse((*path, key))
                if item is not None:
                    kept[key] = settled(feature[key], item, (*path, key))
            return kept
        if isinstance(inner, list):
            return [settled(getattr(feature, "feature", None), item, path) for item in inner]
        return inner

    def refuse(path: tuple[str, ...]) -> None:
        first = next(place for place, key in enumerate(path) if key in _CHOSEN_KEYS)
        problem = f"{'.'.join(path[first:])} is null, as a struct column also holds keys that are absent"
        fail(index, column, problem, value, "give the rows as a .jsonl file, which tells them apart")

    return settled(feature, value, (column,))
