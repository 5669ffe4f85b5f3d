"""Remedies for names that no option has."""

import difflib
from collections.abc import Callable, Collection
from functools import cache
from importlib.resources import files

import yaml


@cache
def other_trainers() -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Names of other trainers: our name or the remedy by their name, and their sections."""
    file = files("unsloth_pack") / "config" / "other_trainers.yaml"
    tables = yaml.safe_load(file.read_text(encoding="utf-8"))
    same, instead = (
        {name: key for key, names in tables[table].items() for name in names.split()}
        for table in ("same", "instead")
    )
    return same, instead, tables["sections"].split()


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
