"""`rank_pattern` and `alpha_pattern` of a `LoraConfig`, of which PEFT passes over what matches nothing."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
