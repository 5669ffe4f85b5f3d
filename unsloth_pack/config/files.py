"""Config files: YAML whose names are those of options, over the base files that they build on.

    base_config: stage1.yaml     # or a list; relative to this file
    learning_rate: 1e-4          # an option of any section
    adapter:                     # or inside its section
      r: 8

Mappings are merged, all else replaces what the base file says, and null restores the default.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from unsloth_pack.config.names import other_trainers, suggest
from unsloth_pack.config.options import ALIASES, OPTIONS, SECTIONS, Place
from unsloth_pack.config.values import mapping

BASE = "base_config"
_NAMES = {name: name for name in OPTIONS if name != "config"} | ALIASES


@dataclass
class Source:
    """The options in files, or on the command line."""

    values: dict[str, Any] = field(default_factory=dict)  # by name; None restores the default
    places: dict[str, Place | None] = field(default_factory=dict)  # of options and parts: `dataset.1.path`
    mistakes: list[tuple[Place | None, str]] = field(default_factory=list)

    def update(self, upper: "Source") -> None:
        """Take the values of another source, which win."""
        for name, value in upper.values.items():
            value, lower = mapping(value) if dict in OPTIONS[name].types else value, self.values.get(name)
            if isinstance(value, dict) and isinstance(lower, dict):
                # The upper parts come first: of patterns the first match counts
                self.values[name] = value | {part: lower[part] for part in lower if part not in value}
                self.places |= dict.fromkeys(f"{name}.{part}" for part in value)
            else:
                self.values[name] = value
                self.places = {at: p for at, p in self.places.items() if at.partition(".")[0] != name}
        self.places |= upper.places
        self.mistakes += upper.mistakes


def read_file(path: Path, above: tuple[str, ...] = ()) -> Source:
    """Read a file over its base files; `above` are the real paths of files that build on this one."""
    if path.exists() and not path.is_file():  # reading it may never end
        raise OSError(None, "no ordinary file")
    whole, file, real = Source(), _File(path), (*above, os.path.realpath(path))
    for base, line in file.bases:
        try:
            below = path.parent / os.path.expanduser(base)
            if os.path.realpath(below) in real:
                raise OSError(None, "it builds on this file")
            whole.update(read_file(below, real))
        except OSError as error:
            file.note(line, f"{BASE} is {base!r}: {error.strerror}; correct it")
    whole.update(file)
    return whole


class _File(Source):
    """One file, and the paths and lines of the files that it builds on."""

    def __init__(self, path: Path):
        super().__init__()
        self.bases: list[tuple[str, int]] = []
        self._name = str(path)
        try:
            self._loader = yaml.SafeLoader(path.read_bytes().decode("utf-8-sig"))
            node = self._loader.get_single_node()
            if isinstance(node, MappingNode):
                self._read_options(node)
            else:
                self.note(1, "holds no `name: value` lines; write one an option")
        except UnicodeDecodeError:
            self.note(1, "not yaml in UTF-8; save the file as UTF-8")
        except yaml.YAMLError as error:  # whose text may hold a secret
            mark = getattr(error, "problem_mark", None)
            self.note(mark.line + 1 if mark else 1, "not yaml; correct it")

    def note(self, line: int, mistake: str) -> None:
        self.mistakes.append(((self._name, line), mistake))

    def _read_options(self, node: Node, section: str = "") -> None:
        _, instead, their_sections = other_trainers()
        groups = () if section else (*SECTIONS, *their_sections)
        for name, line, inner in self._parts(node):
            is_mapping = isinstance(inner, MappingNode)
            if name in _NAMES and f"{section}.{name}" not in instead:
                self._read_option(name, line, inner, section)
            elif name in groups and is_mapping:
                self._read_options(inner, name)
            elif name == BASE and not section:
                value = self._value(inner, BASE)
                paths = value if isinstance(value, list) else [value]
                self.bases = [(str(base), line) for base in paths if base]
            elif name not in SECTIONS or section or self._value(inner, name) is not None:
                whole = f"{section}.{name}" if section else name
                meant = suggest(whole, [*_NAMES, BASE, *(SECTIONS if is_mapping else ())])
                state = "a section, not a value" if name in SECTIONS else "unknown"
                self.note(line, f"{whole} is {state}; {meant or 'see `unsloth-pack --help`'}")

    def _read_option(self, name: str, line: int, node: Node, section: str) -> None:
        own = _NAMES[name]
        option = OPTIONS[own]
        if section not in ("", option.section):
            self.note(line, f"{name} belongs in {option.section}, not in {section}; move it there")
        if own in self.values:
            self.note(line, f"{name} is there twice; keep one of them")
        self.places[own] = self._name, line
        is_one_set = list in option.types and isinstance(node, MappingNode)
        self.values[own] = [self._value(node, f"{own}.0")] if is_one_set else self._value(node, own)

    def _value(self, node: Node, at: str) -> Any:
        """Read a node, and the places of its parts. The types of the options make numbers of its text."""
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            self.note(node.start_mark.line + 1, "a tag stands here; leave it out")
        if isinstance(node, ScalarNode):
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        parts = self._parts(node)
        self.places |= {f"{at}.{name}": (self._name, line) for name, line, _ in parts}
        values = {name: self._value(each, f"{at}.{name}") for name, _, each in parts}
        return values if isinstance(node, MappingNode) else [*values.values()]

    def _parts(self, node: Node) -> list[tuple[str, int, Node]]:
        """Names of a mapping or numbers of a list, with their lines and values; of equal names the last."""
        if not isinstance(node, MappingNode):
            return [(str(n), each.start_mark.line + 1, each) for n, each in enumerate(node.value)]
        self._loader.flatten_mapping(node)
        parts = {str(key.value): (key.start_mark.line + 1, each) for key, each in node.value}
        return [(name, *part) for name, part in parts.items()]
