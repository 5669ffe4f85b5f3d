"""`rank_pattern` and `alpha_pattern` of a `LoraConfig`, of which PEFT passes over what matches nothing."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from unsloth_pack.errors import InputError

_FIELDS = ("rank_pattern", "alpha_pattern")


def check_patterns(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse a pattern that no layer matches, as one does that names a layer which the model has joined.

    Args:
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
            paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
            if not any(map(matches, paths)):
                linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
                has = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
                raise InputError(f"{field} has {pattern!r}, which matches no layer; the model has {has}")
