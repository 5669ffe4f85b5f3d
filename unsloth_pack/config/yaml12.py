"""Scalars as YAML 1.2 reads them: `2e-5` is a number, `no` is a word, `010` is ten. PyYAML reads YAML 1.1."""

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ("~", "n", "N", "")),
    "bool": (r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    "int": (r"[-+]?[0-9]+", tuple("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
    "merge": ("<<", ("<",)),
}


class Loader(yaml.SafeLoader):
    """Reads scalars of the core schema, and no tags of Python."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})$"), [*_first])
Loader.add_constructor(f"{_TAG}int", lambda _, node: int(str(node.value)))


def scalar(text: str) -> Any:
    """The value of a word in a file, such as a number; text that has no other meaning stays."""
    loader = Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    return text if node.tag.endswith((":str", ":merge")) else loader.construct_object(node)


def line_of(name: str, value: object) -> str:
    """`name: value` as one line of YAML."""
    flow = yaml.dump({name: value}, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**9)
    return flow.strip()[1:-1]
