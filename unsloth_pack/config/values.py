"""Types of option values. Each reads the text of a flag, or of a scalar in a file."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Required

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
from typing_extensions import TypedDict

from unsloth_pack.data.columns import IMAGE_COLUMNS, KNOWN_COLUMNS
from unsloth_pack.errors import LAST_SEED, InputError, Mistakes, written

_MISTAKES = {"missing": "missing; give it", "extra_forbidden": "unknown; leave it out"}
_PATTERNS = {r"\S": "it should not be blank", "/": "it should be OWNER/NAME"}
_OF_A_PATTERN = frozenset("\\*+?()[]{}|^$")  # characters that no name of a module has


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"give a regular expression ({error})") from None
    return pattern


def _listed(value: object) -> object:
    """What JSON text holds, or the parts between the commas of another text; anything else as it is."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith(("[", "{")):
        return value.split(",")
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"give correct JSON ({error})") from None


def mapping(value: object) -> object:
    """Read a mapping from its text: a JSON object, or `name=value` with commas between."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        with suppress(ValueError):
            return json.loads(value)
    pairs = [pair.partition("=") for pair in value.split(",")]
    return {name.strip(): text.strip() for name, _, text in pairs} if all(p[1] for p in pairs) else value


def _without_null(value: object) -> object:
    return {n: each for n, each in value.items() if each is not None} if isinstance(value, Mapping) else value


def _plain(value: object) -> object:
    """The number, true, false or null that a text spells; any other text as it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    words: dict[str, object] = {"true": True, "false": False, "null": None, "": None}
    return words.get(value.lower(), value)


def _patterns(value: object) -> object:
    return [value] if isinstance(value, str) and not value.startswith('["') else _listed(value)


def _modules(value: object) -> object:
    if isinstance(value, str) and not value.startswith('["') and _OF_A_PATTERN & {*value}:
        return _compiled(value)
    return value if value == "all-linear" else _listed(value)


Count = Annotated[int, Field(ge=1, lt=2**31)]
CountFrom0 = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, le=LAST_SEED)]
Positive = Annotated[float, Field(gt=0, lt=1e9)]
NotNegative = Annotated[float, Field(ge=0, lt=1e9)]
AtLeast1 = Annotated[float, Field(ge=1, lt=1e9)]
Share = Annotated[float, Field(ge=0, lt=1)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
FilePath = Annotated[str, StringConstraints(pattern=r"\S"), AfterValidator(os.path.expanduser)]
_Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_Names = Annotated[list[_Name], Field(min_length=1)]
_Pattern = Annotated[str, StringConstraints(min_length=1), AfterValidator(_compiled)]
_Single = Annotated[str | bool | int | float | None, BeforeValidator(_plain)]
Names = Annotated[_Names, BeforeValidator(_listed)]
Patterns = Annotated[list[_Pattern], Field(min_length=1), BeforeValidator(_patterns)]
Numbers = Annotated[list[CountFrom0], Field(min_length=1), BeforeValidator(_listed)]
Settings = Annotated[dict[str, _Single], BeforeValidator(_without_null), BeforeValidator(mapping)]
Rates = Annotated[dict[_Pattern, Positive], BeforeValidator(_without_null), BeforeValidator(mapping)]
Split = Annotated[str, StringConstraints(pattern=r"\S")]
Repository = Annotated[str, StringConstraints(pattern="/")]


def _check_different(columns: dict[str, str | None]) -> dict[str, str | None]:
    names = [name for name in columns.values() if name]
    if len({*names}) < len(names):
        raise ValueError("give each column another name")
    return columns


_KNOWN: Any = Literal[(*sorted({*KNOWN_COLUMNS, *IMAGE_COLUMNS}), None)]
_Column = Annotated[_KNOWN, BeforeValidator(_plain)]
Columns = Annotated[dict[str, _Column], AfterValidator(_check_different), BeforeValidator(mapping)]


class EvalSet(TypedDict, total=False):
    """A data set to evaluate on, in a list of several."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    path: Required[FilePath]
    split: Split
    limit: Count
    columns: Columns


class DataSet(EvalSet, total=False):
    """A data set to train on, in a list of several."""

    weight: Positive


def _data_sets(value: object) -> object:
    """A single path as it is, anything else as a list of objects."""
    value = _listed(value)
    items = value if isinstance(value, list) else [value]
    sets = [{"path": each.strip()} if isinstance(each, str) else _without_null(each) for each in items]
    first: Any = sets[0] if len(sets) == 1 and isinstance(sets[0], dict) else {}
    return first["path"] if first.keys() == {"path"} and "," not in str(first["path"]) else sets


_TEXT_OR_LIST = Discriminator(lambda value: "[list]" if isinstance(value, list) else "[text]")
_Text = Annotated[str, Tag("[text]")]
_Path = Annotated[FilePath, Tag("[text]")]
_Sets = Annotated[list[DataSet], Field(min_length=1), Tag("[list]")]
_EvalSets = Annotated[list[EvalSet], Field(min_length=1), Tag("[list]")]
Modules = Annotated[_Text | Annotated[_Names, Tag("[list]")], _TEXT_OR_LIST, BeforeValidator(_modules)]
DataSets = Annotated[_Path | _Sets, _TEXT_OR_LIST, BeforeValidator(_data_sets)]
EvalSets = Annotated[_Path | _EvalSets, _TEXT_OR_LIST, BeforeValidator(_data_sets)]
Rows = Annotated[
    Annotated[Literal["auto"], Tag("[text]")] | Annotated[Count, Tag("[key]")],
    Discriminator(lambda value: "[text]" if value == "auto" else "[key]"),
]
Recompute = Annotated[Literal[True, False, "offload", "unsloth", "auto"], BeforeValidator(_plain)]


def mistakes(error: ValidationError, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place of each mistake (`dataset.1.weight`), and its text; `name` is that of a lone value."""
    for each in error.errors(include_url=False):
        at = [part for part in each["loc"] if part not in ("[text]", "[list]", "[key]")]
        option, *parts = [name, *at] if name else at[1:]
        words = [f"item {part + 1}" if isinstance(part, int) else part for part in parts]
        context, plain = each.get("ctx", {}), each["msg"].partition(", unable")[0]
        remedy = context.get("error") or _PATTERNS.get(str(context.get("pattern")))
        remedy = remedy or re.sub(r"^\w+ should", "it should", plain)
        said = _MISTAKES.get(each["type"], f"{written(each['input'])[:80]}; {remedy}")
        yield ".".join(map(str, [option, *parts])), f"{', '.join([str(option), *words])} is {said}"


def read_as(kind: Any, value: object, name: str) -> Any:
    """Read a value as a type; InputError if it is not of this type."""
    try:
        return TypeAdapter[Any](kind).validate_python(value)
    except ValidationError as error:
        raise Mistakes(InputError(text) for _, text in mistakes(error, name)) from None
