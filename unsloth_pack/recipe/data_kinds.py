"""What the values of options that name data have to be."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from unsloth_pack.data.columns import IMAGE_COLUMNS, KNOWN_COLUMNS
from unsloth_pack.recipe.kinds import (
    Kind,
    Refused,
    RefusedItems,
    or_null,
    path,
    real,
    shown,
    split,
    text,
    whole,
)

_KEYS = ("path", "weight", "split", "limit", "columns")  # of a data set in a list
_NAMES = sorted({*KNOWN_COLUMNS, *IMAGE_COLUMNS})  # that columns may be given
_WEIGHT, _LIMIT = real(above=0), whole(1)


def _data_sets(value: object) -> str | list[dict[str, Any]]:
    """One or several data sets: a path, paths between commas, or a list of paths and objects.

    Returns:
        A single path as it is. Anything else as a list of objects, with the keys that were given.
    """
    found = value
    if isinstance(value, str) and not os.path.exists(os.path.expanduser(value)):
        if value.lstrip().startswith(("[", "{")):
            found = _json(
                value, 'a list of data sets as JSON, such as \'[{"path": "a.jsonl", "weight": 2}]\''
            )
        elif "," in value:
            found = [name.strip() for name in value.split(",")]
    if isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, Sequence) or isinstance(found, str):
        name = path(found)
        return [{"path": name}] if "," in name else name
    if not found:
        raise Refused(value, "at least one data set")
    mistakes: list[tuple[int, str, str]] = []
    items = [_data_set(item, number, mistakes) for number, item in enumerate(found)]
    if mistakes:
        raise RefusedItems(value, mistakes)
    single = items[0]["path"]
    return single if items == [{"path": single}] and "," not in single else items


def _data_sets_read_whole(value: object) -> str | list[dict[str, Any]]:
    """Data sets whose documents all count once, as in an evaluation."""
    found = _data_sets(value)
    mistakes = [
        (number, "weight", f"item {number + 1} ({item['path']}) no weight: it is evaluated on as a whole")
        for number, item in enumerate(found if isinstance(found, list) else [])
        if "weight" in item
    ]
    if mistakes:
        raise RefusedItems(value, mistakes)
    return found


def _column_names(value: object) -> dict[str, str | None]:
    """A mapping of columns: their names -> our names, None for a column that is left out.

    It is an object, or text such as `question=prompt,answer=completion,id=`.
    """
    found = value
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            found = _json(value, 'an object, such as \'{"question": "prompt", "answer": "completion"}\'')
        else:
            found = _pairs(value)
    if not isinstance(found, Mapping) or not found:
        raise Refused(value, "a mapping of columns, such as question=prompt,answer=completion")
    columns: dict[str, str | None] = {}
    for name, to in found.items():
        if to is not None and to not in ("", *_NAMES):
            known = ", ".join(_NAMES)
            raise Refused(
                value, f"{name!r} one of the names {known}, or none to leave it out, not {shown(to)}"
            )
        if to and to in columns.values():
            other = next(other for other, taken in columns.items() if taken == to)
            raise Refused(value, f"{other!r} and {name!r} different names, not both {to!r}")
        columns[text(name)] = to or None
    return columns


def _data_set(item: object, number: int, mistakes: list[tuple[int, str, str]]) -> dict[str, Any]:
    """One item of a list of data sets.

    Args:
        number: of the item, from 0 on.
        mistakes: gets those of the item, as `RefusedItems` takes them.
    """
    place = f"item {number + 1}"
    if not isinstance(item, Mapping):
        try:
            item = {"path": text(item)}
        except Refused:
            mistakes.append((number, "", f"{place} as a path, or an object with a path, not {shown(item)}"))
            return {}
    keys = [key for key in _KEYS if item.get(key) is not None]
    if not isinstance(item.get("path"), str) or not item["path"].strip():
        mistakes.append((number, "path", f"{place} a path"))
        keys = [key for key in keys if key != "path"]
    else:
        place = f"{place} ({item['path']})"
    for key in item:
        if key not in _KEYS:
            mistakes.append((number, key, f"{place} none but the keys {', '.join(_KEYS)}, not {shown(key)}"))
    kinds: dict[str, Kind] = {"path": path, "split": split, "columns": column_names}
    kinds |= {"weight": _WEIGHT, "limit": _LIMIT}
    made: dict[str, Any] = {}
    for key in keys:
        if key == "columns" and item[key] == {}:  # none, whatever the others have
            made[key] = {}
            continue
        try:
            made[key] = kinds[key](item[key])
        except Refused as error:
            of_item = f"in the columns of {place} {error.wanted}"
            if key != "columns":
                of_item = f"as {key} of {place} {error.wanted}, not {shown(item[key])}"
            mistakes.append((number, key, of_item))
    return made


def _pairs(value: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in value.split(",")]
    if not all(name.strip() and sign for name, sign, _ in pairs):
        raise Refused(value, "a mapping of columns, such as question=prompt,answer=completion")
    names = [name.strip() for name, *_ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Refused(value, f"{twice!r} one name, not several")
    return {name: to.strip() for name, (*_, to) in zip(names, pairs, strict=True)}


def _json(value: str, wanted: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Refused(value, wanted) from None


_PAIRS_SCHEMA = {"type": "string", "pattern": "[={]"}
_COLUMNS_SCHEMA = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"enum": [*_NAMES, "", None]},
}
_PATH_SCHEMA = {"type": "string", "pattern": r"\S"}
_DATA_SET_SCHEMA = {
    "path": _PATH_SCHEMA,
    "weight": or_null(_WEIGHT.schema),
    "split": or_null(split.schema),
    "limit": or_null(_LIMIT.schema),
    "columns": or_null({"anyOf": [_COLUMNS_SCHEMA | {"minProperties": 0}, _PAIRS_SCHEMA]}),
}


def _data_sets_schema(*keys: str) -> dict[str, Any]:
    """The schema of data sets, of which each may have these keys."""
    properties = {key: _DATA_SET_SCHEMA[key] for key in keys}
    one = {"type": "object", "required": ["path"], "additionalProperties": False, "properties": properties}
    several = {"type": "array", "minItems": 1, "items": {"anyOf": [_PATH_SCHEMA, {"type": "number"}, one]}}
    return {"anyOf": [path.schema, one, several]}


_SEVERAL = "with commas between them, such as a.jsonl,b.jsonl"

data_sets = Kind(  # one or several data sets
    _data_sets, _data_sets_schema(*_KEYS), several=_SEVERAL, is_text=True
)
data_sets_read_whole = Kind(  # those of an evaluation
    _data_sets_read_whole,
    _data_sets_schema(*(key for key in _KEYS if key != "weight")),
    several=_SEVERAL,
    is_text=True,
)
column_names = Kind(  # columns -> ours
    _column_names,
    {"anyOf": [_COLUMNS_SCHEMA, _PAIRS_SCHEMA]},
    null_inside="",
    several="with commas between them, such as question=prompt,answer=completion",
    has_dotted_names=True,
)
