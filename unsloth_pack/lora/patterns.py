"""Names and patterns of a `LoraConfig`, of which PEFT passes over what matches nothing."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from peft.utils.other import get_pattern_key
from torch import nn

from unsloth_pack.errors import InputError

_FIELDS = ("rank_pattern", "alpha_pattern")


def check_patterns(adapted: Sequence[str], given: Mapping[str, Any]) -> None:
    """Refuse a pattern that no adapted layer matches, for example q_proj in a model with one qkv_proj.

    Args:
        adapted: the paths of what an adapter is put on.
        given: fields of the `LoraConfig`.

    Raises:
        InputError: names the pattern.
    """
    for field in _FIELDS:
        for pattern in given.get(field) or {}:
            try:
                matches = re.compile(rf"(.*\.)?({pattern})$").match  # as PEFT reads it
            except re.error as error:
                raise InputError(
                    f"{field} has {pattern!r}, which is no pattern: {error}; correct it"
                ) from None
            if not any(map(matches, adapted)):
                names = ", ".join(sorted({path.rpartition(".")[2] for path in adapted})) or "no layers"
                raise InputError(f"{field} has {pattern!r}, which matches none of what is adapted: {names}")


def in_any_order(patterns: Mapping[str, Any], adapted: Sequence[str]) -> dict[str, Any]:
    """Patterns that say the same of what is adapted in every order.

    PEFT takes the first one that matches, and a saved config has them sorted. Where another one would come
    first then, each path has a pattern of its own.
    """
    keys = list(patterns)
    found = {path: get_pattern_key(keys, path) for path in adapted}  # the path itself where none matches
    if all(get_pattern_key(sorted(keys), path) == key for path, key in found.items()):
        return dict(patterns)
    return {re.escape(path): patterns[key] for path, key in found.items() if key in patterns}


def check_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse `target_parameters` that the model does not have.

    Raises:
        InputError: names them.
    """
    if isinstance(names, str):
        raise InputError(f"target_parameters is {names!r}; give a list of ends of paths")
    sizes = {path: parameter.dim() for path, parameter in model.named_parameters()}
    paths = sorted(sizes, key=sizes.__getitem__)  # stacks of experts last
    absent = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in paths)]
    if absent:
        raise InputError(
            f"target_parameters names {', '.join(map(repr, absent))}, and no path of a parameter ends so; "
            f"give ends of paths, such as {paths[-1]}"
        )
