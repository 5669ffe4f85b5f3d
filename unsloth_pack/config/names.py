"""Remedies for names that no option has."""

import difflib
from collections.abc import Callable, Collection
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import yaml


class OtherTrainers(NamedTuple):
    """Names of other trainers: our name or the remedy by their name, and their sections."""

    same: dict[str, str]
    instead: dict[str, str]
    sections: list[str]


@cache
def other_trainers() -> OtherTrainers:
    """The names in `other_trainers.yaml`."""
    file = files("unsloth_pack") / "config" / "other_trainers.yaml"
    tables = yaml.safe_load(file.read_text(encoding="utf-8"))
    sections = tables.pop("sections").split()
    by_name = {t: {name: key for key, names in tables[t].items() for name in names.split()} for t in tables}
    return OtherTrainers(**by_name, sections=sections)


def suggest(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """What to write in place of `name`, or "".

    Args:
        name: may be nested: `rlhf.beta`.
        known: names of options.
        spell: how an option is named in the answer.
    """
    same, instead, _ = other_trainers()
    whole = name.strip("-").replace("-", "_").lower()
    group, _, last = whole.rpartition(".")
    for each in (whole, last):
        if each in instead:
            return instead[each]
        if each in known or same.get(each) in known:
            return f"did you mean {spell(same.get(each, each))}?"
    close = difflib.get_close_matches(last, known, 1, 0.75)
    return f"did you mean {spell(close[0])}?" if close else instead.get(group, "")
