"""Config files: YAML whose names are those of options, over the base files that they build on.

    base_config: stage1.yaml     # or a list; relative to this file
    learning_rate: 1e-4          # an option of any section
    adapter:                     # or inside its section
      r: 8

Mappings are merged, all else replaces what the base file says, and null restores the default.
"""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from unsloth_pack.config.names import other_trainers, suggest
from unsloth_pack.config.options import ALIASES, OPTIONS, SECTIONS
from unsloth_pack.config.values import mapping, shown, spelt
from unsloth_pack.config.yaml12 import Loader

BASE = "base_config"
_NAMES = {name: name for name in OPTIONS if name != "config"} | ALIASES


def read_files(path: Path, above: tuple[str, ...] = ()) -> Iterator["Source"]:
    """Read a file, then its base files, those that win first.

    Args:
        above: the real paths of files that build on this one.

    Raises:
        OSError: the file cannot be opened.
    """
    if path.exists() and not path.is_file():  # reading it may never end
        raise OSError(None, "no ordinary file")
    source, real = Source(str(path)), (*above, os.path.realpath(path))
    bases = source.read(path.read_bytes())
    yield source
    for base, line in reversed(bases):
        below, why = path.parent / os.path.expanduser(base), ""
        try:
            if os.path.realpath(below) in real:
                why = "it builds on this file; remove it from one of them"
            else:
                yield from read_files(below, real)
        except OSError as error:
            why = f"{error.strerror}; check the path from this file's folder"
        if why:
            source.note(line, f"{BASE} is {base!r}: {why}")


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class Source:
    """The options in one file, or on the command line.

    Attributes:
        values: by the names of the options; None restores the default.
        lines: of the options and of their parts: `dataset.1.path`.
        mistakes: the line and the text of each.
    """

    def __init__(self, file: str = "", values: dict[str, object] | None = None):
        self.file, self.values = file, values or {}
        self.lines: dict[str, int] = {}
        self.mistakes: list[tuple[int, str]] = []

    def note(self, line: int, mistake: str) -> None:
        self.mistakes.append((line, mistake))

    def read(self, data: bytes) -> list[tuple[str, int]]:
        """Read the values of a file; returns its base files and their lines."""
        try:
            self._loader = Loader(data.decode("utf-8-sig"))
            node = self._loader.get_single_node()
            if isinstance(node, MappingNode):
                return self._read_options(node)
            self.note(1, "holds no `name: value` lines; write one an option")
        except UnicodeDecodeError as error:
            self.note(data.count(b"\n", 0, error.start) + 1, "not yaml in UTF-8; save the file as UTF-8")
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            self._note_no_yaml(mark.line + 1 if mark else 1, error)
        return []

    def _read_options(self, node: MappingNode, section: str = "") -> list[tuple[str, int]]:
        bases: list[tuple[str, int]] = []
        for name, line, inner in self._pairs(node):
            if name in _NAMES:
                self._read_option(name, line, inner, section)
            elif section or name not in (BASE, *SECTIONS):
                self._note_unknown(name, line, inner, section)
            elif name in SECTIONS and isinstance(inner, MappingNode):
                self._read_options(inner, name)
            elif (value := self._value(inner, "")) is None:
                continue
            elif name in SECTIONS:
                remedy = suggest(name, OPTIONS) or "write its options below it"
                self.note(line, f"{name} is a section of options, not a value; {remedy}")
            else:
                bases = [(base, line) for base in (value if isinstance(value, list) else [value])]
                if not all(isinstance(base, str) and base for base, _ in bases):
                    self.note(line, f"{BASE} is {shown(value)}; give a file, or a list of files")
                    bases = []
        return bases

    def _read_option(self, name: str, line: int, node: Node, section: str) -> None:
        option = OPTIONS[_NAMES[name]]
        if section not in ("", option.section):
            self.note(line, f"{name} belongs in {option.section}, not in {section}; move it there")
        if first := self.lines.get(option.name):
            self.note(line, f"{name} is there twice, first in line {first}; keep one of them")
        is_one_set = list in option.types and isinstance(node, MappingNode)
        value = [self._value(node, f"{option.name}.0")] if is_one_set else self._value(node, option.name)
        if type(value) in (int, float) and str in option.types:
            value = node.value  # as it is spelt
        self.lines[option.name] = line
        self.values[option.name] = mapping(value) if dict in option.types else value

    def _note_unknown(self, name: str, line: int, node: Node, section: str) -> None:
        groups, is_mapping = other_trainers().sections, isinstance(node, MappingNode) and not section
        if name == "config":
            self.note(line, f"config cannot be set in a file; name the other file in {BASE}")
        elif is_mapping and name in groups and node.value:
            for part, at, _ in self._pairs(node):
                self._note_name(f"{name}.{part}", at, _NAMES, groups[name])
        else:
            known = [*_NAMES, BASE, *(SECTIONS if is_mapping else ())]
            self._note_name(f"{section}.{name}" if section else name, line, known)

    def _note_name(self, name: str, line: int, known: Collection[str], remedy: str | None = None) -> None:
        meant = suggest(name, known) or suggest(name.rpartition(".")[2], known)
        self.note(line, f"{spelt(name)} is unknown; {meant or remedy or 'see `unsloth-pack --help`'}")

    def _pairs(self, node: Any) -> list[tuple[str, int, Node]]:
        """The names of a mapping, their lines and values. Notes names that are there twice."""
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                self.note(_line(key), "a list or a mapping stands where a name should; write `name: value`")
            elif key.value in first and key.tag != "tag:yaml.org,2002:merge":
                twice = f"{key.value} is there twice, first in line {first[key.value]}"
                self.note(_line(key), f"{twice}; keep one of them")
            else:
                first[key.value] = _line(key)
        self._loader.flatten_mapping(node)
        pairs = {key.value: (key, value) for key, value in node.value if isinstance(key, ScalarNode)}
        return [(name, _line(key), value) for name, (key, value) in pairs.items()]

    def _value(self, node: Node, at: str) -> Any:
        """Read the value of a node, and the lines of its parts."""
        if isinstance(node, MappingNode):
            pairs = self._pairs(node)
            self.lines |= {f"{at}.{name}": line for name, line, _ in pairs}
            return {name: self._value(each, f"{at}.{name}") for name, _, each in pairs}
        if isinstance(node, SequenceNode):
            self.lines |= {f"{at}.{number}": _line(each) for number, each in enumerate(node.value)}
            return [self._value(each, f"{at}.{number}") for number, each in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            self._note_no_yaml(_line(node), error)

    def _note_no_yaml(self, line: int, error: Exception) -> None:
        """Note why the parser stopped, without words of the file, of which some are secret."""
        why = getattr(error, "problem", None) or getattr(error, "reason", None) or "a value has another type"
        said = re.sub(r" '[^<'\\][^']+'", "", why)
        self.note(line, f"not yaml ({said}); correct it")
