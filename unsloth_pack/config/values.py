"""Types of option values. Each reads text of the command line and values of YAML."""

import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Required

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from unsloth_pack.config.yaml12 import scalar
from unsloth_pack.data.columns import IMAGE_COLUMNS, KNOWN_COLUMNS
from unsloth_pack.errors import LAST_SEED, InputError, Mistakes

_OF_A_PATTERN = frozenset("\\*+?()[]{}|^$")  # characters that no name of a module has


@dataclass(frozen=True)
class Wanted:
    """Make this text the message of every error of a type."""

    text: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "wanted", custom_error_message=self.text)


def _number(wanted: str) -> BeforeValidator:
    """Text such as 1e3 is a number too, true is none."""

    def read(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(wanted)
        try:
            number = float(value) if isinstance(value, str) else None
        except ValueError:
            number = None
        return value if number is None else int(number) if number.is_integer() else number

    return BeforeValidator(read)


def _whole(wanted: str, least: int, most: int = 2**31 - 1) -> tuple[Any, ...]:
    return Field(ge=least, le=most), Wanted(f"a whole number {wanted}"), _number(f"a whole number {wanted}")


def _real(text: str, **limits: Any) -> tuple[Any, ...]:
    return Field(allow_inf_nan=False, **limits), Wanted(f"a number {text}"), _number(f"a number {text}")


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
    except ValueError:
        return None


def _listed(value: object) -> object:
    """A list, a JSON list, or the parts between the commas of a text."""
    if isinstance(value, str):
        parsed = _json(value)
        return parsed if isinstance(parsed, list) else value.split(",")
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def mapping(value: object) -> object:
    """Read a mapping from its text: a JSON object, or `name=value` with commas between."""
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


Count = Annotated[int, *_whole("of at least 1", 1)]
CountFrom0 = Annotated[int, *_whole("of at least 0", 0)]
Seed = Annotated[int, *_whole(f"from 0 to {LAST_SEED}", 0, LAST_SEED)]
Positive = Annotated[float, *_real("above 0 and below 1e+09", gt=0, lt=1e9)]
NotNegative = Annotated[float, *_real("of at least 0 and below 1e+09", ge=0, lt=1e9)]
AtLeast1 = Annotated[float, *_real("of at least 1 and below 1e+09", ge=1, lt=1e9)]
Share = Annotated[float, *_real("of at least 0 and below 1", ge=0, lt=1)]
OpenShare = Annotated[float, *_real("above 0 and below 1", gt=0, lt=1)]
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


def _check_different(columns: dict[str, str | None]) -> dict[str, str | None]:
    names = [name for name in columns.values() if name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"each column another name, not {twice!r} twice")
    return columns


_KNOWN: Any = Literal[(*sorted({*KNOWN_COLUMNS, *IMAGE_COLUMNS}), None)]
_Column = Annotated[_KNOWN, BeforeValidator(lambda name: None if name == "" else name)]
Columns = Annotated[dict[str, _Column], AfterValidator(_check_different), BeforeValidator(mapping)]


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


def _simplest(sets: str | list[dict[str, object]]) -> str | list[dict[str, object]]:
    is_path = isinstance(sets, list) and len(sets) == 1 and sets[0].keys() == {"path"}
    return str(sets[0]["path"]) if is_path and "," not in str(sets[0]["path"]) else sets  # type: ignore[index]


_Path = Annotated[FilePath, Tag("[path]")]
_FORMS = (
    Discriminator(lambda value: "[sets]" if isinstance(value, list) else "[path]"),
    *(BeforeValidator(_data_sets), AfterValidator(_simplest)),
)
DataSets = Annotated[_Path | Annotated[list[DataSet], Field(min_length=1), Tag("[sets]")], *_FORMS]
EvalSets = Annotated[_Path | Annotated[list[EvalSet], Field(min_length=1), Tag("[sets]")], *_FORMS]


def spelt(name: str) -> str:
    """A name of a file, in quotes where it is not a plain one."""
    return name if re.fullmatch(r"[\w.-]{1,80}", name) else shown(name)


def shown(value: object) -> str:
    """A value as files and flags spell it, shortened."""
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else reprlib.repr(str(value))


def mistakes(error: ValidationError, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place of each mistake in its section (`dataset.1.weight`), and its text.

    Args:
        name: of the value; else the names of section and option lead to it.
    """
    for each in error.errors(include_url=False):
        at = [part for part in each["loc"] if part not in ("[path]", "[sets]", "[key]")]
        option, parts = (name, at) if name else (str(at[1]), at[2:])
        words = ", ".join(f"item {part + 1}" if isinstance(part, int) else spelt(part) for part in parts)
        text = f"{option}{': ' * bool(words)}{words} is {_end(each, parts[-1] if parts else '')}"
        yield ".".join(map(str, [option, *parts])), text


def _end(error: Any, part: str | int) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "missing; give one"
    if kind == "extra_forbidden":
        return f"unknown; use {', '.join((EvalSet if part == 'weight' else DataSet).__annotations__)}"
    choices = re.findall("'(.*?)'", str(context.get("expected")))
    wanted = {
        "value_error": str(context.get("error")),
        "literal_error": f"one of {', '.join(choices)}",
        "dict_type": "a path, or an object with a path" if isinstance(part, int) else "name=value pairs",
        "too_short": "at least one",
    }
    said = "true or false" if kind.startswith("bool") else wanted.get(kind, error["msg"])
    return f"{shown(error['input'])}; give {said}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_as(kind: object, value: object, name: str) -> Any:
    """Read a value as a type.

    Raises:
        InputError: it is not of this type.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise Mistakes(InputError(text) for _, text in mistakes(error, name)) from None
