"""Of an architecture without a patch: which one that has a patch is the most like it, and what differs.

Two things are compared: the fields that a configuration declares beside those of every transformers
configuration, and the names of the modules and weights in a layer. The latter are read from the source of the
model, because importing all of them takes long.
"""

import ast
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_NAMED = 6  # differences in a message
_NEAR = 1.0  # what is shared of the fields and of the names has to be more than this, of 2
_IN_LAYERS = (
    "Attention",
    "MLP",
    "Layer",
    "Block",
    "Experts",
    "Router",
    "Mixer",
    "Conv",
    "Gate",
    "MoE",
    "Moe",
)
_OF_OTHER_PARTS = ("Vision", "Audio")


class _Made(NamedTuple):
    """What an architecture is made of: the fields of its configuration, the names in its layers."""

    fields: frozenset[str]
    names: frozenset[str]


def nearest(model_type: str, supported: Collection[str]) -> str | None:
    """One line about the architecture that is nearest, or None where none is near.

    Args:
        model_type: of no patched architecture.
        supported: those that are patched.
    """
    if (inner := _text_model_of(model_type)) in supported:
        return f"its text model, {inner!r}, has one"
    own = _made_of(model_type)
    if own is None:
        alike = get_close_matches(model_type, supported, n=1)
        return f"the nearest name is {alike[0]!r}" if alike else None
    others = {name: made for name in sorted(supported) if (made := _made_of(name)) is not None}
    name = max(others, key=lambda name: _alike(own, others[name]))
    if _alike(own, others[name]) <= _NEAR:
        return None
    other = others[name]
    said = [
        *_differs("its configuration adds", "lacks", own.fields, other.fields),
        *_differs("its layers add", "lack", own.names, other.names),
    ]
    return f"the nearest is {name!r}: {', '.join(said) or 'its configuration and layers name the same'}"


def _alike(one: _Made, other: _Made) -> float:
    """0 to 2: the share of the fields and the share of the names that both have."""
    return sum(len(a & b) / max(1, len(a | b)) for a, b in zip(one, other, strict=True))


def _differs(adds: str, lacks: str, own: frozenset[str], others: frozenset[str]) -> Iterator[str]:
    """One part of the message, or none. `adds` begins with whose names they are."""
    more, less = sorted(own - others), sorted(others - own)
    if more:
        yield f"{adds} {_listed(more)}" + (f" and {lacks} {_listed(less)}" if less else "")
    elif less:
        yield f"{adds.rsplit(' ', 1)[0]} {lacks} {_listed(less)}"


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _text_model_of(model_type: str) -> str | None:
    """The architecture of the text model inside a model of vision and language."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[model_type]  # whose `get` knows none of them
    return getattr(getattr(kind, "sub_configs", {}).get("text_config"), "model_type", None)


def _made_of(model_type: str) -> _Made | None:
    """None where transformers does not know the architecture."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if model_type not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[model_type]
    if not is_dataclass(kind):
        return None
    common = {field.name for field in fields(PreTrainedConfig)}
    source = find_spec(kind.__module__.replace("configuration_", "modeling_"))
    names = () if source is None or source.origin is None else _names_in_layers(Path(source.origin))
    return _Made(frozenset(field.name for field in fields(kind)) - common, frozenset(names))


def _names_in_layers(source: Path) -> Iterator[str]:
    """Of modules and weights that the layers of a text model are given."""
    for kind in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(kind, ast.ClassDef) or any(part in kind.name for part in _OF_OTHER_PARTS):
            continue
        if kind.name.endswith(_IN_LAYERS):
            yield from (name for node in ast.walk(kind) for name in _set_to_a_module(node))


def _set_to_a_module(node: ast.AST) -> Iterator[str]:
    """The attributes in `self.NAME = Class(...)`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        made = node.value.func
        kind = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
        if kind[:1].isupper():
            yield from (target.attr for target in node.targets if isinstance(target, ast.Attribute))
