"""What a caller gives for a model."""

import reprlib
from typing import Any

from torch import nn

from unsloth_pack.errors import InputError


def require_model(model: Any, remedy: str = "give a transformers model, or a PEFT model of one") -> None:
    """Refuse what is no module: None, a name, a config, a class.

    Args:
        remedy: what to give instead.

    Raises:
        InputError: it is none.
    """
    if not isinstance(model, nn.Module):
        shown = " ".join(reprlib.repr(model).split())  # a config has many lines
        raise InputError(f"model is {shown}; {remedy}")
