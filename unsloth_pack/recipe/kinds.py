"""The kinds of options: each reads a value, given as text on the command line or as YAML has it.

A kind returns the value in its own type, or raises `Refused`, which argparse knows how to report. Its JSON
schema says the same to an editor.
"""

import argparse
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, TypeVar

from unsloth_pack.recipe.yaml_file import scalar

Number = TypeVar("Number", int, float)

_TEXT = {"type": ["string", "number"]}
_WHOLE, _REAL = r"\d[\d_]*(\.0*)?([eE]\+?\d+)?", r"(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?"
# How the tokens of hubs and trackers begin
_SECRET = re.compile(r"(hf|sk|gh[opsu]|github_pat|glpat|xox[abp]|wandb)[-_]\w{10}|\b[0-9a-f]{40}\b")


@dataclass(frozen=True, eq=False)
class Kind:
    """What a value of an option has to be.

    Args:
        read: returns the value in its own type, or raises `Refused`.
        schema: the same as a JSON schema.
        null_inside: what null means in a mapping of this kind; None where it restores a default.
        several: how one flag gives several values; empty where it gives one.
        is_text: whether any text will do, so that a number stands for its own spelling.
        has_dotted_names: of a mapping, whether names in it may have dots.
    """

    read: Callable[[object], Any]
    schema: Mapping[str, Any]
    null_inside: Any = None
    several: str = ""
    is_text: bool = False
    has_dotted_names: bool = False

    def __call__(self, value: object) -> Any:
        return self.read(value)


class Refused(argparse.ArgumentTypeError):
    """A value that is not of its kind.

    Args:
        value: what was given.
        wanted: what to give instead.
    """

    def __init__(self, value: object, wanted: str):
        super().__init__(f"got {shown(value)}; give {wanted}")
        self.wanted = wanted


class RefusedItems(Refused):
    """A list, some items of which are not of their kind. As a `Refused`, it tells the first mistake.

    Args:
        value: what was given.
        mistakes: of each the number of its item from 0 on, the item's key or "", and what to give instead.
    """

    def __init__(self, value: object, mistakes: Sequence[tuple[int, str, str]]):
        super().__init__(value, mistakes[0][2])
        self.mistakes = mistakes
        self.lines = [f"got {shown(value)}; give {wanted}" for *_, wanted in mistakes]


def shown(value: object) -> str:
    """A value for an error message, which no value makes long and no secret stands in."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, str) and is_secret(value):
        return "what looks like a secret"
    return "a list" if isinstance(value, list | set | tuple) else reprlib.repr(str(value))


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a value, or of null, which restores the default."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    types = schema["type"]
    return {**schema, "type": [*([types] if isinstance(types, str) else types), "null"]}


def is_secret(text: str) -> bool:
    """Whether a text looks like the token of a hub or a tracker."""
    return _SECRET.search(text) is not None


def name_of(what: str, *, may_be_secret: bool = True) -> Kind:
    """The kind of a text.

    Args:
        what: to give where no text is given.
        may_be_secret: whether a text may look like the token of a hub.
    """

    def read(value: object) -> str:
        """Numbers and dates, which YAML makes of some names, are read as they are spelt."""
        if isinstance(value, bool) or not isinstance(value, str | int | float | date):
            raise Refused(value, what)
        try:
            str(value).encode()
        except ValueError:  # half of a surrogate pair, or more digits than Python spells
            raise Refused(value, "text in UTF-8") from None
        if is_secret(str(value)) and not may_be_secret:
            raise Refused(value, what)
        return str(value)

    return Kind(read, _TEXT, is_text=True)


def path_of(what: str) -> Kind:
    """The kind of a path, or of a name that may be one. `~` is the home folder, as shells leave it after `=`.

    Args:
        what: to give where no text is given.
    """
    read = name_of(what)
    return Kind(lambda value: os.path.expanduser(read(value)), _TEXT, is_text=True)


text = name_of("text in quotes")  # any text
path = path_of("text in quotes")


def _split(value: object) -> str:
    wanted = "the name of a split, such as validation"
    name: str = name_of(wanted)(value)
    if not name.strip():
        raise Refused(value, wanted)
    return name


split = Kind(_split, {**_TEXT, "pattern": r"\S"}, is_text=True)  # a part of a data set


def _number_schema(kind: str, spelling: str, least: float, is_least: bool, **bounds: float) -> dict[str, Any]:
    """The schema of a number, also of one in quotes, of which it knows whether it is negative or 0.

    Args:
        spelling: a pattern of its text, without the sign.
        is_least: whether it may be `least` itself.
    """
    sign = r"\+?" if least >= 0 else "[-+]?"
    digits = "" if least < 0 or (is_least and least == 0) else "(?=[^eE]*[1-9])"
    return {"type": [kind, "string"], **bounds, "pattern": rf"^\s*{sign}{digits}{spelling}\s*$"}


def whole(least: int, most: int = 2**31 - 1) -> Kind:
    """The kind of a whole number that is at least `least` and at most `most`."""

    def read(value: object) -> int:
        number = _number(_integer, value, (int, float))
        if number is None or number < least:
            raise Refused(value, f"a whole number of at least {least}")
        if number > most:
            raise Refused(value, f"a whole number of at most {most}")
        return number

    return Kind(read, _number_schema("integer", _WHOLE, least, True, minimum=least, maximum=most))


def real(least: float = -math.inf, *, above: float = -math.inf, below: float = 1e9) -> Kind:
    """The kind of a number with `least <= number`, `above < number` and `number < below`."""
    bounds = [f"of at least {least:g}"] if least > -math.inf else []
    bounds += [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"below {below:g}"]

    def read(value: object) -> float:
        number = _number(float, value, (int, float))
        if number is None or not (number >= least and above < number < below):
            raise Refused(value, f"a number {' and '.join(bounds)}")
        return number

    limits = {"exclusiveMaximum": below}
    limits |= {"minimum": least} if least > -math.inf else {}
    limits |= {"exclusiveMinimum": above} if above > -math.inf else {}
    return Kind(read, _number_schema("number", _REAL, max(least, above), above < least, **limits))


def one_of(*choices: str) -> Kind:
    """The kind of a word out of a few."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise Refused(value, f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
        return value

    return Kind(read, {"enum": [*choices]})


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in ("true", "false"):
        raise Refused(value, "true or false")
    return value.lower() == "true"


_BOOLEAN = {"type": ["boolean", "string"], "pattern": "^([Tt]rue|TRUE|[Ff]alse|FALSE)$"}
boolean = Kind(_boolean, _BOOLEAN)  # a switch


def switch_or(*words: str) -> Kind:
    """The kind of a switch that also takes a few words."""

    def read(value: object) -> bool | str:
        if isinstance(value, str) and value in words:
            return value
        try:
            return _boolean(value)
        except Refused:
            raise Refused(value, f"one of true, false, {', '.join(words)}") from None

    return Kind(read, {"anyOf": [_BOOLEAN, {"enum": [*words]}]})


def single_values(value: object) -> dict[str, Any] | None:
    """A JSON object of single values, or its text; None for anything else."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, Mapping) or not all(
        isinstance(part, str | int | float | None) for part in found.values()
    ):
        return None
    return {str(name): part for name, part in found.items()}


_JSON_TEXT = {"type": "string", "pattern": r"^\s*\{"}


def object_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object, or of its text."""
    return {"anyOf": [{"type": "object", "additionalProperties": or_null(schema)}, _JSON_TEXT]}


_SINGLE_VALUES = object_of({"type": ["string", "number", "boolean"]})


def json_object(example: str) -> Kind:
    """A JSON object of single values, such as `example`."""

    def read(value: object) -> dict[str, Any]:
        found = single_values(value)
        if found is None:
            raise Refused(value, f"a JSON object of single values, such as '{example}'")
        return found

    return Kind(read, _SINGLE_VALUES, several=f"in one JSON object, such as '{example}'")


def _settings(value: object) -> dict[str, Any]:
    """An object of single values, or text such as `momentum=0.9,nesterov=true`."""
    wanted = "settings such as block_size=128,beta2=0.95, or a JSON object of them"
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [pair.partition("=") for pair in value.split(",")]
        names = [name.strip() for name, *_ in pairs]
        if len(set(names)) < len(names) or not all(
            name and text.strip() for name, (*_, text) in zip(names, pairs, strict=True)
        ):
            raise Refused(value, wanted)
        return {name: scalar(text.strip()) for name, (*_, text) in zip(names, pairs, strict=True)}
    found = single_values(value)
    if found is None:
        raise Refused(value, wanted)
    return found


settings = Kind(  # names with single values
    _settings,
    {"anyOf": [*_SINGLE_VALUES["anyOf"], {"type": "string", "pattern": "="}]},
    several="with commas between them, such as beta2=0.95,eps=1e-8",
)


def _integer(value: Any) -> int:
    """Of a number that is whole, or of its text; also of 1e3."""
    if isinstance(value, str) and re.fullmatch(rf"\s*[-+]?{_WHOLE}\s*", value) and {*value} & {*".eE"}:
        value = float(value)
    number = int(value)
    if not isinstance(value, str) and number != value:
        raise ValueError
    return number


def _number(
    read: Callable[[Any], Number], value: object, types: tuple[type[int] | type[float], ...]
) -> Number | None:
    """`value` as `read` reads it: one of these types, or text that spells one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (str, *types)):
        return None
    try:
        return read(value)
    except (ValueError, OverflowError):
        return None
