"""Mistakes of config files: each has a place, and all are told at once."""

from dataclasses import dataclass, field
from pathlib import Path

from unsloth_pack.errors import InputError, Mistakes

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
    """The mistakes that were found so far, in the order of files, then of lines.

    Attributes:
        options: that a mistake is about, or that were meant in its place.
    """

    lines: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    options: set[str] = field(default_factory=set)

    def open(self, path: Path) -> None:
        """From now on mistakes of this file may come; those of files that are opened later stand below."""
        self.lines.setdefault(str(path), [])

    def add(self, place: Place, what: str, remedy: str, option: str = "") -> None:
        """Note a mistake.

        Args:
            option: that it is about, or that was meant.
        """
        self.lines.setdefault(place.file, []).append((place.line, f"{place}: {what}; {remedy}"))
        self.options.add(option)

    def __bool__(self) -> bool:
        return any(self.lines.values())

    def check(self) -> None:
        """Raise `Mistakes` if there are any."""
        said = [line for found in self.lines.values() for _, line in sorted(found, key=lambda each: each[0])]
        said = [*dict.fromkeys(said)]
        if len(said) > _MOST:
            said = [*said[:_MOST], f"and {len(said) - _MOST} more; correct these first"]
        if said:
            raise Mistakes([*map(InputError, said)])
