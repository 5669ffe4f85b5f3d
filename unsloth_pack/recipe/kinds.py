"""The kinds of options: functions that read a value, given as text on the command line or as YAML has it.

Each returns the value in its own type, or raises `Refused`, which argparse knows how to report.
"""

import argparse
import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, TypeVar

Kind = Callable[[object], Any]
Number = TypeVar("Number", int, float)


class Refused(argparse.ArgumentTypeError):
    """A value that is not of its kind.

    Args:
        value: what was given.
        wanted: what to give instead.
    """

    def __init__(self, value: object, wanted: str):
        super().__init__(f"got {shown(value)}; give {wanted}")
        self.wanted = wanted


def shown(value: object) -> str:
    """A value for an error message, which no value makes long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | set | tuple) else reprlib.repr(str(value))


def text(value: object) -> str:
    """Any text. Numbers and dates, which YAML makes of some names, are read as they are spelt."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise Refused(value, "text in quotes")
    try:
        str(value).encode()
    except ValueError:  # half of a surrogate pair, or more digits than Python spells
        raise Refused(value, "text in UTF-8") from None
    return str(value)


def path(value: object) -> str:
    """A path, or a name that may be one. `~` is the home folder: shells do not expand it after `=`."""
    return os.path.expanduser(text(value))


def whole(least: int, most: int = 2**31 - 1) -> Callable[[object], int]:
    """The kind of a whole number that is at least `least` and at most `most`."""

    def read(value: object) -> int:
        number = _number(int, value, (int,))
        if number is None or number < least:
            raise Refused(value, f"a whole number of at least {least}")
        if number > most:
            raise Refused(value, f"a whole number of at most {most}")
        return number

    return read


def real(
    least: float = -math.inf, *, above: float = -math.inf, below: float = 1e9
) -> Callable[[object], float]:
    """The kind of a number with `least <= number`, `above < number` and `number < below`."""
    bounds = [f"of at least {least:g}"] if least > -math.inf else []
    bounds += [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"below {below:g}"]

    def read(value: object) -> float:
        number = _number(float, value, (int, float))
        if number is None or not (number >= least and above < number < below):
            raise Refused(value, f"a number {' and '.join(bounds)}")
        return number

    return read


def one_of(*choices: str) -> Callable[[object], str]:
    """The kind of a word out of a few."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise Refused(value, f"one of {', '.join(choices)}")
        return value

    return read


def boolean(value: object) -> bool:
    """The kind of a switch: true or false."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in ("true", "false"):
        raise Refused(value, "true or false")
    return value.lower() == "true"


def switch_or(*words: str) -> Callable[[object], bool | str]:
    """The kind of a switch that also takes a few words."""

    def read(value: object) -> bool | str:
        if isinstance(value, str) and value in words:
            return value
        try:
            return boolean(value)
        except Refused:
            raise Refused(value, f"one of true, false, {', '.join(words)}") from None

    return read


def json_object(value: object) -> dict[str, Any]:
    """The kind of a JSON object of single values."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, Mapping) or not all(
        isinstance(part, str | int | float | None) for part in found.values()
    ):
        raise Refused(value, """a JSON object of single values, such as '{"loftq_bits": 4}'""")
    return {str(name): part for name, part in found.items()}


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
