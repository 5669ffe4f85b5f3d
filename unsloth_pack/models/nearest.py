"""Of an architecture without a patch: which one that has a patch is the most like it, and what differs.

Configurations are compared, by the fields that they declare beside those of every transformers configuration.
"""

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from difflib import get_close_matches

_NAMED = 6  # differences in a message


def nearest(model_type: str, supported: Collection[str]) -> str | None:
    """One line about the architecture that is nearest, or None where none is near.

    Args:
        model_type: of no patched architecture.
        supported: those that are patched.
    """
    if (inner := _text_model_of(model_type)) in supported:
        return f"its text model, {inner!r}, has one"
    own = _fields(model_type)
    if own is None:
        alike = get_close_matches(model_type, supported, n=1)
        return f"the nearest name is {alike[0]!r}" if alike else None
    others = {name: known for name in sorted(supported) if (known := _fields(name)) is not None}
    name = max(others, key=lambda name: len(own & others[name]) / len(own | others[name]))
    if len(own & others[name]) < len(own ^ others[name]):
        return None
    more, less = sorted(own - others[name]), sorted(others[name] - own)
    said = [f"adds {_listed(more)}"] * bool(more) + [f"lacks {_listed(less)}"] * bool(less)
    differs = f": its configuration {' and '.join(said)}" if said else ", with the same configuration"
    return f"the nearest is {name!r}{differs}"


def _text_model_of(model_type: str) -> str | None:
    """The architecture of the text model inside a model of vision and language."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[model_type]  # whose `get` knows none of them
    return getattr(getattr(kind, "sub_configs", {}).get("text_config"), "model_type", None)


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _fields(model_type: str) -> frozenset[str] | None:
    """The fields of a configuration; None where transformers does not know the architecture."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if model_type not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[model_type]
    if not is_dataclass(kind):
        return None
    return frozenset(field.name for field in fields(kind)) - {
        field.name for field in fields(PreTrainedConfig)
    }
