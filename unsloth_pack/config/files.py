"""Config files: YAML whose names are those of options, over the base files that they build on.

    base_config: stage1.yaml     # or a list; relative to this file
    learning_rate: 1e-4          # an option of any section
    adapter:                     # or inside its section
      r: 8

Mappings are merged deeply, all else replaces what the base file says, and null restores the default.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from unsloth_pack.config.names import other_trainers, suggest
from unsloth_pack.config.options import ALIASES, OPTIONS, SECTIONS, Option
from unsloth_pack.config.values import mapping, shown, spelt
from unsloth_pack.config.yaml12 import Loader

BASE = "base_config"
_FLAGS_ONLY = {"config": f"name the other file in {BASE}"}
_FLAGS_ONLY |= dict.fromkeys(("debug", "help"), "give it on the command line")
_NAMES = {**OPTIONS, **{alias: OPTIONS[name] for alias, name in ALIASES.items()}}


@dataclass
class Source:
    """What one file, or the command line, says.

    Args:
        file: its path; "" for the command line.
        values: by the names of the options; None restores the default.
        lines: of the options and of their parts: `dataset.1.path`.
        mistakes: lines and what is wrong there.
        wrong: the options that mistakes are about, or that were meant.
    """

    file: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    mistakes: list[tuple[int, str]] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)

    def note(self, line: int, mistake: str, option: str = "") -> None:
        self.mistakes.append((line, mistake))
        self.wrong.add(option)


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings. `upper` wins, and its names come first: of patterns the first match counts."""
    both = {
        name: merged(lower[name], value)
        if isinstance(value, dict) and isinstance(lower.get(name), dict)
        else value
        for name, value in upper.items()
    }
    return {**both, **{name: value for name, value in lower.items() if name not in both}}


def read_files(path: Path, above: tuple[str, ...] = ()) -> Iterator[Source]:
    """A file, then its base files, those that win first.

    Args:
        above: the real paths of files that build on this one.

    Raises:
        OSError, ValueError: the file cannot be opened.
    """
    if path.exists() and not path.is_file():  # reading it may never end
        raise OSError(None, "no ordinary file")
    source, real = Source(str(path)), (*above, os.path.realpath(path))
    bases = _Reader(source).read(path.read_bytes())
    yield source
    for base, line in reversed(bases):
        below = path.parent / os.path.expanduser(base)
        try:
            if os.path.realpath(below) in real:
                source.note(
                    line, f"{BASE} is {base!r}, which builds on this file; remove it from one of them"
                )
            else:
                yield from read_files(below, real)
        except (OSError, ValueError) as error:
            source.note(
                line, f"{BASE} is {base!r}: {why_not_open(error)}; check the path from this file's folder"
            )


def why_not_open(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or "no name of a file"


class _Reader:
    """Reads the options of one file into its source."""

    def __init__(self, source: Source):
        self.source = source

    def read(self, data: bytes) -> list[tuple[str, int]]:
        """Read the file; returns its base files and their lines."""
        try:
            self.loader = Loader(data.decode("utf-8-sig"))
            node = self.loader.get_single_node()
            if isinstance(node, MappingNode):
                return self._options(node)
            self.source.note(1, "holds no `name: value` lines; write one an option")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self.source.note(line, "not yaml in UTF-8; save the file as UTF-8")
        except RecursionError:
            self.source.note(1, "not yaml that can be read: too deeply nested; write it flatter")
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            self.source.note(mark.line + 1 if mark else 1, f"not yaml ({_why_not_yaml(error)}); correct it")
        return []

    def _options(self, node: MappingNode, section: str = "") -> list[tuple[str, int]]:
        bases: list[tuple[str, int]] = []
        for name, line, inner in self._pairs(node):
            if name in SECTIONS and not section:
                if isinstance(inner, MappingNode):
                    self._options(inner, name)
                elif self._value(inner, "") is not None:
                    remedy, option = suggest(name, OPTIONS) or ("write its options below it", "")
                    self.source.note(line, f"{name} is a section of options, not a value; {remedy}", option)
            elif name in _NAMES and name not in _FLAGS_ONLY:
                self._take(name, _NAMES[name], line, inner, section)
            elif name == BASE and not section:
                bases += self._bases(line, inner)
            else:
                self._note_unknown(name, line, inner, section)
        return bases

    def _take(self, name: str, option: Option, line: int, node: Node, section: str) -> None:
        if section not in ("", option.section):
            self.source.note(
                line, f"{name} belongs in {option.section}, not in {section}; move it there", option.name
            )
        if first := self.source.lines.get(option.name):
            self.source.note(
                line, f"{name} is there twice, first in line {first}; keep one of them", option.name
            )
        is_one_set = list in option.types and isinstance(node, MappingNode)
        value = [self._value(node, f"{option.name}.0")] if is_one_set else self._value(node, option.name)
        if type(value) in (int, float) and str in option.types:
            value = node.value  # as it is spelt
        self.source.lines[option.name] = line
        self.source.values[option.name] = mapping(value) if dict in option.types else value

    def _bases(self, line: int, node: Node) -> list[tuple[str, int]]:
        value = self._value(node, "")
        names = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(name, str) and name for name in names):
            return [(name, line) for name in names]
        self.source.note(line, f"{BASE} is {shown(value)}; give the name of a file, or a list of names")
        return []

    def _note_unknown(self, name: str, line: int, node: Node, section: str) -> None:
        groups = other_trainers().sections
        if not section and name in groups and isinstance(node, MappingNode) and node.value:
            for part, at, _ in self._pairs(node):
                self._note(f"{name}.{part}", at, groups[name])
        elif name in _FLAGS_ONLY:
            self.source.note(line, f"{name} cannot be set in a file; {_FLAGS_ONLY[name]}")
        elif name == BASE:
            self.source.note(line, f"{BASE} stands in {section}; move it to the top")
        else:
            first, _, rest = name.partition(".")
            is_parent = first in SECTIONS or (first in OPTIONS and dict in OPTIONS[first].types)
            remedy = f"write `{first}: {{{rest}: ...}}`" if rest and is_parent else None
            more = SECTIONS if isinstance(node, MappingNode) and not section else ()
            self._note(f"{section}.{name}" if section else name, line, remedy, [BASE, *more])

    def _note(self, name: str, line: int, remedy: str | None, more: list[str] | tuple[()] = ()) -> None:
        known = [*_NAMES, *more]
        found = suggest(name, known) or suggest(name.rpartition(".")[2], known)
        meant, option = found or (remedy or "see `unsloth-pack --help`", "")
        self.source.note(line, f"{spelt(name)} is unknown; {meant}", option)

    def _pairs(self, node: MappingNode) -> list[tuple[str, int, Node]]:
        """The names of a mapping, their lines and values; names that are there twice are noted."""
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                self.source.note(line, "a list or a mapping stands where a name should; write `name: value`")
            elif key.value in first and key.tag != "tag:yaml.org,2002:merge":
                again = f"{key.value} is there twice, first in line {first[key.value]}"
                self.source.note(line, f"{again}; keep one of them", key.value)
            else:
                first[key.value] = line
        self.loader.flatten_mapping(node)
        pairs = {key.value: (key, value) for key, value in node.value if isinstance(key, ScalarNode)}
        return [(name, key.start_mark.line + 1, value) for name, (key, value) in pairs.items()]

    def _value(self, node: Node, at: str) -> Any:
        """The value of a node; the lines of its parts go into the source."""
        if isinstance(node, MappingNode):
            values = {}
            for name, line, inner in self._pairs(node):
                self.source.lines[f"{at}.{name}"] = line
                values[name] = self._value(inner, f"{at}.{name}")
            return values
        if isinstance(node, SequenceNode):
            lines = {f"{at}.{number}": inner.start_mark.line + 1 for number, inner in enumerate(node.value)}
            self.source.lines |= lines
            return [self._value(inner, place) for inner, place in zip(node.value, lines, strict=True)]
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            self.source.note(node.start_mark.line + 1, f"not yaml ({_why_not_yaml(error)}); correct it")


def _why_not_yaml(error: Exception) -> str:
    """Why the parser stopped, without words of the file, of which some are secret."""
    why = getattr(error, "problem", None) or getattr(error, "reason", None) or "a value has another type"
    return re.sub(r" '[^<'\\][^']+'", "", why)
