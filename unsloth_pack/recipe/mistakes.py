"""Mistakes of config files: each has a place, and all are told at once."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from unsloth_pack.errors import Mistakes

_MOST = 50  # lines; nobody corrects more at once


@dataclass(frozen=True, order=True)
class Place:
    """A line of a config file, spelt as editors and compilers spell it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Found:
    """The mistakes that were found so far, in the order of files, then of lines."""

    lines: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def open(self, path: Path) -> None:
        """From now on mistakes of this file may come; those of files that are opened later stand below."""
        self.lines.setdefault(str(path), [])

    def add(self, place: Place, what: str, remedy: str) -> None:
        self.lines.setdefault(place.file, []).append((place.line, f"{place}: {what}; {remedy}"))

    def __bool__(self) -> bool:
        return any(self.lines.values())

    def names(self, option: str) -> bool:
        """Whether a mistake or its remedy names an option."""
        said = [line for found in self.lines.values() for _, line in found]
        return any(re.search(rf"\b{option}\b", line) for line in said)

    def check(self) -> None:
        """Raise `Mistakes` if there are any."""
        said = [line for found in self.lines.values() for _, line in sorted(found, key=lambda each: each[0])]
        said = [*dict.fromkeys(said)]
        if len(said) > _MOST:
            said = [*said[:_MOST], f"and {len(said) - _MOST} more; correct these first"]
        if said:
            raise Mistakes(said)
