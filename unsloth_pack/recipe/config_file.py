"""Config files: YAML whose names are those of options, and the base files that they build on.

    base_config: stage1.yaml     # or a list; relative to this file
    learning_rate: 1e-4          # an option of any section
    adapter:                     # or inside its section
      r: 8

Mappings are merged deeply, all else replaces what the base file says, and null restores the default.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.flags import Option, options_of, section_names
from unsloth_pack.recipe.kinds import Refused, RefusedItems, is_secret, shown
from unsloth_pack.recipe.mistakes import Found, Place
from unsloth_pack.recipe.other_trainers import GROUPS, REMEDIES
from unsloth_pack.recipe.remedies import Remedy, remedy_for
from unsloth_pack.recipe.yaml_file import Placed, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BASE = "base_config"
_FLAGS_ONLY = {
    "config": f"name the other file in {BASE}",
    "debug": "give it on the command line",
    "help": "give it on the command line",
}
_LONGEST_CHAIN = 50  # files


def read_config(path: Path, kind: "type[DataclassInstance]", found: Found) -> dict[str, Placed]:
    """The values in a config file and its base files, by the names of the options.

    A value is checked here, but for a mapping, of which a file may hold a part: `check_mappings` does that.

    Args:
        kind: the dataclass of the options.
        found: gets the mistakes of all files.

    Raises:
        InputError: the file cannot be opened.
    """
    try:
        return _Files(kind, found).read(path, ())
    except (OSError, ValueError) as error:
        raise InputError(f"config is {str(path)!r}: {_why(error)}; check the path") from None


def merged(
    lower: Mapping[str, Placed], upper: Mapping[str, Placed], upper_first: bool = True
) -> dict[str, Placed]:
    """Two mappings as one, in which `upper` wins.

    Args:
        upper_first: whether the names of `upper` come first. Of patterns, the first that matches counts.
    """
    values = dict(upper)
    for name, new in upper.items():
        old = lower.get(name)
        if old is not None and isinstance(old.value, dict) and isinstance(new.value, dict):
            values[name] = Placed(merged(old.value, new.value, upper_first), new.place)
    return {**values, **lower, **values} if upper_first else {**lower, **values}


def check_mappings(values: Mapping[str, Placed], kind: "type[DataclassInstance]", found: Found) -> None:
    """Note the mappings that are not what their options take.

    Raises:
        InputError: the command line made the mistake.
    """
    for name, placed in values.items():
        if not isinstance(placed.value, dict):
            continue
        try:
            options_of(kind)[name].kind(placed.plain)
        except Refused as error:
            what = f"{name} is {shown(placed.value)}"
            if placed.place is None:
                raise InputError(f"{what}; give {error.wanted}") from None
            found.add(placed.place, what, f"give {error.wanted}", name)


def _placed(value: Any, place: Place, items: tuple[Mapping[str, Place], ...]) -> Placed:
    """A value that was read; that of a mapping is one of `Placed`, also where the file has it as text."""
    if isinstance(value, dict):
        value = {name: Placed(inner, place) for name, inner in value.items()}
    return Placed(value, place, items=items)


def _mistakes(error: Refused, placed: Placed, place: Place) -> Iterator[tuple[Place, str]]:
    """Where each mistake of a value stands, and what to give instead."""
    if not isinstance(error, RefusedItems) or not placed.items:
        yield place, error.wanted
        return
    for number, key, wanted in error.mistakes:
        places = placed.items[number]
        yield places.get(key, places[""]), wanted


def _why(error: OSError | ValueError) -> str:
    return error.strerror or "no file" if isinstance(error, OSError) else "no name of a file"


class _Files:
    """Reads files, each once, and notes what is wrong in them."""

    def __init__(self, kind: "type[DataclassInstance]", found: Found):
        self.options, self.sections, self.found = options_of(kind), section_names(kind), found
        self._read: dict[str, dict[str, Placed]] = {}

    def read(self, path: Path, above: tuple[str, ...]) -> dict[str, Placed]:
        """The values of a file over those of its base files.

        Args:
            above: the files that build on this one, by their real paths.
        """
        real = os.path.realpath(path)
        if real not in self._read:
            tree = read_yaml(path, self.found)
            values: dict[str, Placed] = {}
            for base, place in self._bases(tree.pop(BASE, None)):
                values = merged(values, self._base(path, base, place, (*above, real)))
            own: dict[str, Placed] = {}
            self._take_all(tree, (), own)
            self._read[real] = merged(values, own)
        return self._read[real]

    def _bases(self, given: Placed | None) -> Iterator[tuple[str, Place]]:
        if given is None or given.value is None or given.place is None:
            return
        names = given.value if isinstance(given.value, list) else [given.value]
        if all(isinstance(name, str) and name for name in names):
            yield from ((name, given.place) for name in names)
        else:
            self.found.add(
                given.place, f"{BASE} is {shown(given.value)}", "give the name of a file, or a list of names"
            )

    def _base(self, path: Path, name: str, place: Place, above: tuple[str, ...]) -> dict[str, Placed]:
        base = path.parent / os.path.expanduser(name)
        what = f"{BASE} is {shown(name)}"
        if len(above) > _LONGEST_CHAIN:
            self.found.add(place, f"{what}, after {len(above)} files", "join some of them")
            return {}
        try:
            if os.path.realpath(base) not in above:
                return self.read(base, above)
            self.found.add(place, f"{what}, which builds on this file", "remove it from one of them")
            return {}
        except (OSError, ValueError) as error:
            self.found.add(
                place, f"{what}: {_why(error)}", "check the path, which begins at this file's folder"
            )
            return {}

    def _take_all(self, tree: Mapping[str, Placed], section: tuple[str, ...], own: dict[str, Placed]) -> None:
        for name, placed in tree.items():
            assert placed.place is not None
            if (*section, name) in self.sections:
                self._take_section(name, placed, placed.place, section, own)
            elif name in self.options and name not in _FLAGS_ONLY:
                self._take_option(name, placed, placed.place, section, own)
            else:
                self._note_unknown(name, placed, placed.place, section)

    def _take_section(
        self, name: str, placed: Placed, place: Place, section: tuple[str, ...], own: dict[str, Placed]
    ) -> None:
        if isinstance(placed.value, dict):
            self._take_all(placed.value, (*section, name), own)
        elif placed.value is not None:
            remedy = remedy_for(name, self.options, REMEDIES) or Remedy("write its options below it")
            self.found.add(place, f"{name} is a section of options, not a value", *remedy)

    def _take_option(
        self, name: str, placed: Placed, place: Place, section: tuple[str, ...], own: dict[str, Placed]
    ) -> None:
        option = self.options[name]
        home = ".".join(option.path[:-1])
        if section and section != option.path[:-1]:
            what = f"{name} belongs in {home}, not in {'.'.join(section)}"
            self.found.add(place, what, "move it there", option.name)
        if (first := own.get(option.name)) and first.place:
            what = f"{name} is there twice, first in line {first.place.line}"
            self.found.add(place, what, "keep one of them", option.name)
        own[option.name] = self._checked(name, option, placed, place)

    def _checked(self, name: str, option: Option, placed: Placed, place: Place) -> Placed:
        if placed.value is None or (option.takes_mapping and isinstance(placed.value, dict)):
            return placed
        given = placed.spelt if placed.spelt and option.kind.is_text else placed.plain
        try:
            return _placed(option.kind(given), place, placed.items)
        except Refused as error:
            for at, wanted in _mistakes(error, placed, place):
                self.found.add(at, f"{name} is {shown(given)}", f"give {wanted}", option.name)
            return Placed(None, place)

    def _note_unknown(self, name: str, placed: Placed, place: Place, section: tuple[str, ...]) -> None:
        if not section and name in GROUPS and isinstance(placed.value, dict) and placed.value:
            for part, inner in placed.value.items():
                assert inner.place is not None
                of_group = GROUPS[name]
                self._note(f"{name}.{part}", inner.place, Remedy(of_group) if of_group else None)
        elif name in _FLAGS_ONLY:
            self.found.add(place, f"{name} cannot be set in a file", _FLAGS_ONLY[name])
        elif name == BASE:
            self.found.add(place, f"{BASE} stands in {'.'.join(section)}", "move it to the top")
        else:
            is_group = isinstance(placed.value, dict) and not section
            sections = [".".join(each) for each in self.sections if is_group]
            meant = remedy_for(name, self.options, REMEDIES) if section else self._nested(name)
            self._note(".".join((*section, name)), place, meant, sections)

    def _note(self, name: str, place: Place, otherwise: Remedy | None, more: list[str] | None = None) -> None:
        remedy = remedy_for(name, [*self.options, BASE, *(more or [])], REMEDIES) or otherwise
        is_plain = re.fullmatch(r"[\w.-]{1,80}", name) and not is_secret(name)
        what = f"{name if is_plain else shown(name)} is unknown"
        self.found.add(place, what, *(remedy or Remedy("see `unsloth-pack --help`")))

    def _nested(self, name: str) -> Remedy | None:
        """What to write for a name with dots, if its first part is a section or takes a mapping."""
        first, _, rest = name.partition(".")
        option = self.options.get(first)
        is_parent = (first,) in self.sections or (option is not None and option.takes_mapping)
        return Remedy(f"write `{first}: {{{rest}: ...}}`", first) if rest and is_parent else None
