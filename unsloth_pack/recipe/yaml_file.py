"""YAML files whose values know their lines.

A value is read as YAML 1.2 has it: `2e-5` is a number, `no` is a word, `010` is ten. Tags are refused. The
text of a file is in no message, because a line may hold a secret.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from unsloth_pack.recipe.mistakes import Found, Place

_MOST_VALUES = 100_000  # with those of aliases, each counted as often as it is named
_MERGE, _STR = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_SCALARS = {  # YAML 1.2, core schema
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": ("<<", "<"),
}


@dataclass(frozen=True)
class Placed:
    """A value, and where it stands.

    Args:
        value: of a mapping, a dict of `Placed`; of all else, as YAML has it.
        place: None for a value of the command line.
        spelt: a number's own spelling, for whoever wants text; empty for all else.
        items: of a list, where each item stands, under "", and where the keys of each do.
    """

    value: Any
    place: Place | None
    spelt: str = ""
    items: tuple[Mapping[str, Place], ...] = ()

    @property
    def plain(self) -> Any:
        """The value without its places. What is null in a mapping is left out of it."""
        if not isinstance(self.value, dict):
            return self.value
        return {name: each.plain for name, each in self.value.items() if each.value is not None}

    def place_of(self, part: str) -> Place | None:
        """Where a part of the value stands: `1.columns` of a list, or a name of a mapping; else the value."""
        if self.items and part:
            number, _, key = part.partition(".")
            places = self.items[int(number)]
            return places.get(key or "path", places[""])
        inner = self.value.get(part) if isinstance(self.value, dict) else None
        return (inner and inner.place) or self.place


class _Loader(yaml.SafeLoader):
    """Knows the types of the core schema alone."""


_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in (*_SCALARS, "str", "seq", "map")
}


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what YAML 1.1 or 1.2 would read as something else than text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _whole(loader: yaml.SafeLoader, node: ScalarNode) -> int:
    bases = {"0x": 16, "0o": 8}
    return int(node.value, bases.get(node.value[:2], 10))


for _name, (_pattern, _first) in _SCALARS.items():
    for _kind in (_Loader, _Dumper):
        _first_letters = ["" if letter == "\0" else letter for letter in _first]
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), _first_letters
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


def line_of(name: str, value: object) -> str:
    """`name: value` as one line that `read_yaml` reads as the same value."""
    flow = yaml.dump({name: value}, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**9)
    return flow.strip()[1:-1]


def scalar(text: str) -> Any:
    """What a word means in a file, such as a number; the text itself where YAML has no meaning for it."""
    loader = _Loader("")
    tag = loader.resolve(ScalarNode, text, (True, False))
    try:
        return text if tag in (_STR, _MERGE) else loader.construct_object(ScalarNode(tag, text))
    except (ValueError, yaml.YAMLError):
        return text


def read_yaml(path: Path, found: Found) -> dict[str, Placed]:
    """The mapping in a file, by name.

    Args:
        found: gets the mistakes. What is no YAML, or no mapping, is one mistake, and the result is empty.

    Raises:
        OSError, ValueError: the file cannot be opened, is no ordinary one, or no file can have such a name.
    """
    found.open(path)
    text = _text_of(path, found)
    if text is None:
        return {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found.add(_place_of(error, path, text), *_why_not_yaml(error))
        return {}
    if not isinstance(node, MappingNode):
        found.add(Place(str(path), 1), "holds no `name: value` lines", "write one an option")
        return {}
    try:
        reader = _Reader(path, loader, found)
        reader.survey(node)
        return dict(reader.mapping(node))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found.add(_place_of(error, path, text), *_why_not_yaml(error))
        return {}


def _text_of(path: Path, found: Found) -> str | None:
    if path.exists() and not path.is_file():  # reading it may never end
        raise OSError(errno.EINVAL, "no ordinary file")
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found.add(Place(str(path), line), "not yaml in UTF-8", "save the file as UTF-8")
        return None


def _place_of(error: Exception, path: Path, text: str) -> Place:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        return Place(str(path), text.count("\n", 0, error.position) + 1)
    return Place(str(path), mark.line + 1 if mark else 1)


def _why_not_yaml(error: Exception) -> tuple[str, str]:
    """What is wrong, and the remedy; of the parser's words those that hold nothing of the file."""
    if isinstance(error, RecursionError):
        return "not yaml that can be read: too deeply nested", "write it flatter"
    if isinstance(error, yaml.reader.ReaderError):
        return "not yaml: a character that no text holds", "remove it"
    if isinstance(error, yaml.composer.ComposerError):
        several = "single document" in str(error.context)
        said = "a second document begins" if several else "an alias without an anchor, or an anchor twice"
        return f"not yaml: {said}", "remove it"
    if isinstance(error, yaml.constructor.ConstructorError):
        if "tag" in str(error.problem):
            return "not plain yaml: a value has a tag", "write it without"
        return "not yaml: `<<` merges mappings, and a name is text", "correct it"
    problem = getattr(error, "problem", None)
    said = f" ({problem})" if problem and re.fullmatch(r"[\w ,<>'\\:?%@`-]{,80}", problem) else ""
    return f"not yaml{said}", "correct it"


class _Reader:
    """Makes values of nodes, each node once: aliases of aliases name one a million times.

    Args:
        found: gets the mistakes.
    """

    def __init__(self, path: Path, loader: yaml.SafeLoader, found: Found):
        self.file, self.loader, self.found = str(path), loader, found
        self._made: dict[int, dict[str, Placed]] = {}
        self._sizes: dict[int, int] = {}

    def survey(self, node: Node) -> int:
        """How many values a node holds; names in it that are duplicate, or no text, are noted.

        Raises:
            MarkedYAMLError: it holds itself, or too many.
        """
        known = self._sizes.get(id(node))
        if known is None:
            self._sizes[id(node)] = -1
            parts = [part for each in _parts(node) for part in each]
            known = self._sizes[id(node)] = 1 + sum(map(self.survey, parts))
            if isinstance(node, MappingNode):
                self._note_bad_names(node)
        if known < 0 or known > _MOST_VALUES:
            raise yaml.MarkedYAMLError(
                problem="its aliases hold themselves or too much", problem_mark=node.start_mark
            )
        return known

    def _note_bad_names(self, node: MappingNode) -> None:
        first: dict[str, Place] = {}
        for key, _ in node.value:
            place = self._place(key)
            if not isinstance(key, ScalarNode):
                self.found.add(place, "a list or a mapping stands where a name should", "write `name: value`")
                continue
            name = key.value
            if name in first and key.tag != _MERGE:
                self.found.add(
                    place, f"{name} is there twice, first in line {first[name].line}", "keep one of them"
                )
            first.setdefault(name, place)

    def mapping(self, node: MappingNode) -> dict[str, Placed]:
        """The values of a mapping by name, those that it merges in first."""
        if id(node) not in self._made:
            self.loader.flatten_mapping(node)
            pairs = [(key, value) for key, value in node.value if isinstance(key, ScalarNode)]
            self._made[id(node)] = {key.value: self._value(key, value) for key, value in pairs}
        return self._made[id(node)]

    def _value(self, key: Node, node: Node) -> Placed:
        if isinstance(node, MappingNode):
            return Placed(self.mapping(node), self._place(key))
        try:
            value = self.loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            self.found.add(self._place(key), *_why_not_yaml(error))
            value = None
        spelt = node.value if type(value) in (int, float) else ""
        items = map(self._places, node.value) if isinstance(node, SequenceNode) else ()
        return Placed(value, self._place(key), spelt, tuple(items))

    def _places(self, node: Node) -> dict[str, Place]:
        keys = [key for key, _ in node.value] if isinstance(node, MappingNode) else []
        return {"": self._place(node)} | {key.value: self._place(key) for key in keys if _is_name(key)}

    def _place(self, key: Node) -> Place:
        return Place(self.file, key.start_mark.line + 1)


def _is_name(node: Node) -> bool:
    return isinstance(node, ScalarNode)


def _parts(node: Node) -> Iterator[tuple[Node, ...]]:
    if isinstance(node, MappingNode):
        yield from node.value
    elif isinstance(node, SequenceNode):
        yield tuple(node.value)
