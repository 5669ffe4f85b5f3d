"""How a row is refused: InputError names row, column, value and remedy."""

import reprlib
from typing import Any, NoReturn

from unsloth_pack.errors import InputError


def fail(index: int, column: str, problem: str, value: Any, remedy: str) -> NoReturn:
    """Raise the InputError for row `index`, with the value shortened."""
    raise InputError(f"row {index}, column {column!r}: {problem}, got {reprlib.repr(value)}; {remedy}")
