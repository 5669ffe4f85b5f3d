"""What the values of options that name modules have to be."""

import json
import re
from collections.abc import Mapping
from typing import Any

from unsloth_pack.recipe.kinds import Kind, Refused, object_of, real, shown, single_values, whole

_COMMAS = "with commas between them"
_OF_A_PATTERN = frozenset("\\*+?()[]{}|^$")  # characters that no name of a module has


def _names_of_modules(value: object) -> str | list[str]:
    """Names of modules, or a regular expression of whole paths, or "all-linear"."""
    if isinstance(value, str) and not _is_json_list(value) and _OF_A_PATTERN & set(value):
        return _pattern(value)
    return "all-linear" if value == "all-linear" else _names(value)


def _names(value: object) -> list[str]:
    """A list of names: with commas between them on the command line."""
    found = _listed(value)
    if not found or not all(isinstance(name, str) and name.strip() for name in found):
        raise Refused(value, "names with commas between them, such as q_proj,v_proj")
    return [name.strip() for name in found]


def _patterns(value: object) -> list[str]:
    """Regular expressions: one, or a list of them."""
    found = _listed(value) if not isinstance(value, str) or _is_json_list(value) else [value]
    if not found or not all(isinstance(each, str) and each.strip() for each in found):
        raise Refused(value, "a regular expression, or a list of them")
    return [_pattern(each) for each in found]


def whole_numbers(least: int) -> Kind:
    """The kind of a list of whole numbers that are at least `least`."""
    one = whole(least)

    def read(value: object) -> list[int]:
        found = [value] if isinstance(value, int | float) else _listed(value)
        try:
            if found:
                return [one(each) for each in found]
        except Refused:
            pass
        raise Refused(value, f"whole numbers of at least {least}, with commas between them") from None

    several = {"type": "string", "pattern": r"^\s*\[?\s*\d[\d_]*\s*(,\s*\d[\d_]*\s*)*\]?\s*$"}
    schema = {"anyOf": [*_one_or_more(one.schema)["anyOf"], several]}
    return Kind(read, schema, several=f"{_COMMAS}, such as 0,1")


def _rates(value: object) -> dict[str, float]:
    """Learning rates by regular expression."""
    wanted = """a JSON object of a rate for each regular expression, such as '{"lm_head": 1e-5}'"""
    found = single_values(value)
    if found is None:
        raise Refused(value, wanted)
    for pattern, each in found.items():
        try:
            found[_pattern(pattern)] = _RATE(each)
        except Refused as error:
            raise Refused(value, f"{wanted}, and for {pattern!r} {error.wanted}, not {shown(each)}") from None
    return found


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise Refused(value, f"a regular expression ({error})") from None
    return value


def _is_json_list(value: str) -> bool:
    return value.strip().startswith('["') and value.strip().endswith('"]')


def _listed(value: object) -> list[Any]:
    """A list, a JSON list, or what stands between the commas of a text."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = value.split(",")
        return found if isinstance(found, list) else value.split(",")
    return list(value) if isinstance(value, list | tuple) else []


def _one_or_more(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a list; one item may stand alone."""
    return {"anyOf": [schema, {"type": "array", "minItems": 1, "items": schema}]}


_NAME = {"type": "string", "pattern": r"\S"}
_RATE = real(above=0)

names_of_modules = Kind(_names_of_modules, _one_or_more(_NAME), several=f"{_COMMAS}, such as q_proj,v_proj")
names = Kind(_names, _one_or_more(_NAME), several=f"{_COMMAS}, such as lm_head,norm")
patterns = Kind(_patterns, _one_or_more(_NAME), several="""as a JSON list, such as '["lm_head", "norm"]'""")
rates = Kind(  # learning rates by regular expression
    _rates,
    object_of(_RATE.schema),
    several="""in one JSON object, such as '{"lm_head": 1e-5, "norm": 1e-4}'""",
    has_dotted_names=True,
)
