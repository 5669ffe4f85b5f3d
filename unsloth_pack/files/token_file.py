"""The file that names new tokens. This module imports no torch, so that options are checked without it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError, about

NewTokens = Mapping[str, str | None]  # token -> description, None where it has none


def read_new_tokens(path: Path) -> dict[str, str | None]:
    """The tokens in a file: one a line, or as JSON or YAML a list, or a mapping of token to description.

    Raises:
        InputError: the file cannot be read, holds no token or one twice.
    """
    with about("add_tokens"):
        return _tokens_in(path)


def _tokens_in(path: Path) -> dict[str, str | None]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"add_tokens is {str(path)!r}: {reason}; give a file of tokens") from None
    if path.suffix in (".json", ".yaml", ".yml"):
        entries = _entries(path, text)
    else:
        entries = [(line.strip(), None) for line in text.splitlines() if line.strip()]
    tokens: dict[str, str | None] = {}
    for token, description in entries:
        if not isinstance(token, str) or not token.strip() or not isinstance(description, str | None):
            raise InputError(
                f"add_tokens is {str(path)!r}: {token!r}: {description!r} is no token with a description; "
                "put both in quotes"
            )
        if token in tokens:
            raise InputError(f"add_tokens is {str(path)!r}: {token!r} is there twice; keep one")
        tokens[token] = description or None
    if not tokens:
        raise InputError(f"add_tokens is {str(path)!r}: it holds no token; write one a line")
    return tokens


def _entries(path: Path, text: str) -> list[tuple[Any, Any]]:
    import yaml

    try:
        if path.suffix == ".json":  # of an object with a name twice, json keeps the last
            found = json.loads(text, object_pairs_hook=lambda pairs: pairs)
            is_list = isinstance(found, list) and not all(isinstance(each, tuple) for each in found)
            return [(each, None) for each in found] if is_list else list(found)
        node, found = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        raise InputError(
            f"add_tokens is {str(path)!r}: not {path.suffix[1:]}; correct it, or write one token a line into "
            "a file of another name"
        ) from None
    if isinstance(found, Mapping) and isinstance(node, yaml.MappingNode):
        return [(name.value, found.get(name.value)) for name, _ in node.value]
    return [(each, None) for each in found] if isinstance(found, list) else []
