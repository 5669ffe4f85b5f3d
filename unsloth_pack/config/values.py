"""Types of option values. Each reads text of the command line and values of YAML, and says what it takes."""

import argparse
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Required

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic import GetCoreSchemaHandler as Handler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from unsloth_pack.config.yaml12 import scalar
from unsloth_pack.data.columns import IMAGE_COLUMNS, KNOWN_COLUMNS
from unsloth_pack.errors import LAST_SEED

_OF_A_PATTERN = frozenset("\\*+?()[]{}|^$")  # characters that no name of a module has


@dataclass(frozen=True)
class Wanted:
    """Make this text the message of every error of a type."""

    text: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "wanted", custom_error_message=self.text)


@dataclass(frozen=True)
class Bounds:
    """Limit a number. Text such as 1e3 is a number too, true is none."""

    ge: int | None = None
    gt: int | None = None
    lt: int | None = None
    le: int = 2**31 - 1

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> CoreSchema:
        inner: CoreSchema = core_schema.int_schema(ge=self.ge, le=self.le)
        words: dict[str, float | None] = {"of at least": self.ge, "above": self.gt}
        if source is not int:
            lt = self.lt or 1e9
            inner = core_schema.float_schema(ge=self.ge, gt=self.gt, lt=lt, allow_inf_nan=False)
            words["below"] = lt
        limits = " and ".join(f"{word} {limit:g}" for word, limit in words.items() if limit is not None)

        def read(value: object, within: Any) -> int | float:
            try:
                return within(None if isinstance(value, bool) else _number(value))
            except ValidationError as error:
                is_more = source is int and error.errors()[0]["type"] == "less_than_equal"
                what = f"number of at most {self.le}" if is_more else f"number {limits}"
                wanted = f"a {'whole ' if source is int else ''}{what}"
                raise PydanticCustomError("wanted", "{text}", {"text": wanted}) from None

        return core_schema.no_info_wrap_validator_function(read, inner)


@dataclass(frozen=True)
class OneOf:
    """Limit a text to a few words, or to none of them."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> CoreSchema:
        return core_schema.literal_schema([*self.words, None])


def _number(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from None
    return pattern


def _json(text: str) -> Any:
    """The JSON value of a text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _listed(value: object) -> object:
    """A list, a JSON list, or the parts between the commas of a text."""
    if isinstance(value, str):
        parsed = _json(value)
        return parsed if isinstance(parsed, list) else value.split(",")
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def mapping(value: object) -> object:
    """A mapping of its text: a JSON object, or `name=value` with commas between; anything else stays."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        parsed = _json(value)
        return value if parsed is None else parsed
    pairs = [pair.partition("=") for pair in value.split(",")]
    values = {name.strip(): scalar(text.strip()) for name, sign, text in pairs if name.strip() and sign}
    return values if len(values) == len(pairs) else value


def _patterns(value: object) -> object:
    return [value] if isinstance(value, str) and not value.startswith('["') else _listed(value)


def _modules(value: object) -> object:
    if isinstance(value, str) and not value.startswith('["') and _OF_A_PATTERN & {*value}:
        return _compiled(value)
    return value if value == "all-linear" else _listed(value)


Count = Annotated[int, Bounds(ge=1)]
CountFrom0 = Annotated[int, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, le=LAST_SEED)]
Positive = Annotated[float, Bounds(gt=0)]
NotNegative = Annotated[float, Bounds(ge=0)]
AtLeast1 = Annotated[float, Bounds(ge=1)]
Share = Annotated[float, Bounds(ge=0, lt=1)]
OpenShare = Annotated[float, Bounds(gt=0, lt=1)]
FilePath = Annotated[  # the pattern refuses bytes that are not UTF-8
    str, StringConstraints(pattern=""), AfterValidator(os.path.expanduser), Wanted("text in quotes")
]
Single = str | bool | int | float | None
_Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_Names = Annotated[list[_Name], Field(min_length=1)]
_Pattern = Annotated[
    str, StringConstraints(min_length=1), Wanted("a regular expression"), AfterValidator(_compiled)
]
_BY_COMMAS = "names with commas between them, such as q_proj,v_proj"
Names = Annotated[_Names, Wanted(_BY_COMMAS), BeforeValidator(_listed)]
Modules = Annotated[str | _Names, Wanted(_BY_COMMAS), BeforeValidator(_modules)]
Patterns = Annotated[list[_Pattern], Field(min_length=1), BeforeValidator(_patterns)]
Numbers = Annotated[
    Annotated[list[CountFrom0], Field(min_length=1)],
    Wanted("whole numbers of at least 0, with commas between them"),
    BeforeValidator(_listed),
]
Settings = Annotated[
    dict[str, Single],
    Wanted("single values, such as beta2=0.95, or a JSON object of them"),
    BeforeValidator(mapping),
]
Rates = Annotated[dict[_Pattern, Positive], BeforeValidator(mapping)]
Split = Annotated[str, StringConstraints(pattern=r"\S"), Wanted("the name of a split, such as validation")]


def _of_different_names(columns: dict[str, str | None]) -> dict[str, str | None]:
    names = [name for name in columns.values() if name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"each column another name, not {twice!r} twice")
    return columns


_COLUMNS = OneOf((*sorted({*KNOWN_COLUMNS, *IMAGE_COLUMNS}),))
_Column = Annotated[str | None, _COLUMNS, BeforeValidator(lambda name: None if name == "" else name)]
Columns = Annotated[dict[str, _Column], AfterValidator(_of_different_names), BeforeValidator(mapping)]


class EvalSet(TypedDict, total=False):
    """A data set to evaluate on, in a list of several."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    path: Required[Annotated[FilePath, StringConstraints(pattern=r"\S"), Wanted("a path")]]
    split: Split
    limit: Count
    columns: Columns


class DataSet(EvalSet, total=False):
    """A data set to train on, in a list of several."""

    weight: Positive


def _data_sets(value: object) -> object:
    """A path as it is, anything else as a list of objects."""
    is_json = isinstance(value, str) and value.lstrip().startswith(("[", "{"))
    if isinstance(value, str) and (is_json or "," in value):
        if os.path.exists(os.path.expanduser(value)):
            return [{"path": value}] if "," in value else value
        value = _json(value) if is_json else value.split(",")
        if value is None:
            raise ValueError("""data sets as JSON, such as '[{"path": "a.jsonl", "weight": 2}]'""")
    sets = [value] if isinstance(value, Mapping) else value
    return [*map(_data_set, sets)] if isinstance(sets, list | tuple) else sets


def _data_set(item: object) -> object:
    if isinstance(item, str | int | float) and not isinstance(item, bool):
        return {"path": str(item).strip()}
    if isinstance(item, Mapping):
        return {key: each for key, each in item.items() if each is not None}
    return item


def _simplest(sets: str | list[Any]) -> str | list[Any]:
    is_path = len(sets) == 1 and isinstance(sets, list) and sets[0].keys() == {"path"}
    return str(sets[0]["path"]) if is_path and "," not in sets[0]["path"] else sets  # type: ignore[index]


_Path = Annotated[FilePath, Tag("[path]")]
_FORMS = (
    Discriminator(lambda value: "[sets]" if isinstance(value, list) else "[path]"),
    *(BeforeValidator(_data_sets), AfterValidator(_simplest)),
)
DataSets = Annotated[_Path | Annotated[list[DataSet], Field(min_length=1), Tag("[sets]")], *_FORMS]
EvalSets = Annotated[_Path | Annotated[list[EvalSet], Field(min_length=1), Tag("[sets]")], *_FORMS]


def spelt(name: str) -> str:
    """A name that somebody wrote, in quotes where it is not a plain one."""
    return name if re.fullmatch(r"[\w.-]{1,80}", name) else shown(name)


def shown(value: object) -> str:
    """A value as files and flags spell it, shortened."""
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else reprlib.repr(str(value))


def explained(error: ValidationError, depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Each mistake: its option and part (`dataset.1.weight`), the part in words, the end of `NAME is ...`.

    Args:
        depth: how many names lead to the value.
    """
    for each in error.errors(include_url=False):
        at = [part for part in each["loc"] if part not in ("[path]", "[sets]", "[key]")]
        words = ", ".join(f"item {part + 1}" if isinstance(part, int) else spelt(part) for part in at[depth:])
        yield ".".join(map(str, at[1:])), words, _end(each, at[-1] if len(at) > depth else "")


def _end(error: Any, part: str | int) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "missing; give one"
    if kind == "extra_forbidden":
        return f"unknown; use {', '.join((EvalSet if part == 'weight' else DataSet).__annotations__)}"
    wanted = {
        "value_error": str(context.get("error")),
        "literal_error": f"one of {context.get('expected', '').replace(chr(39), '').replace(' or ', ', ')}",
        "dict_type": "a path, or an object with a path" if isinstance(part, int) else "name=value pairs",
        "too_short": "at least one",
    }
    said = "true or false" if kind.startswith("bool") else wanted.get(kind, error["msg"])
    return f"{shown(error['input'])}; give {said}"


class Refused(argparse.ArgumentTypeError):
    """A value is not of its type.

    Args:
        ends: what is wrong, as in `argument --dataset: ...`.
    """

    def __init__(self, error: ValidationError, depth: int = 0):
        found = explained(error, depth)
        self.ends = [f"{words} is {end}" if words else f"got {end}" for _, words, end in found]
        super().__init__("; ".join(self.ends))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_as(kind: Any, value: object) -> Any:
    """A value as a type reads it.

    Raises:
        Refused: it is not of this type.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise Refused(error) from None
