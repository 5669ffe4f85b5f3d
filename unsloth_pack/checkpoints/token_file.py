"""Read the file that names new tokens. Imports no torch, so that options are checked without it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError

NewTokens = Mapping[str, str | None]  # token -> description, None where it has none


def read_new_tokens(path: str) -> dict[str, str | None]:
    """The tokens in a file: one a line, or as JSON or YAML a list, or a mapping of token to description.

    Raises:
        InputError: the file cannot be read, holds no token or one twice.
    """
    text, suffix = _text_of(path), Path(path).suffix
    if suffix in (".json", ".yaml", ".yml"):
        entries = _entries(path, text, suffix[1:])
    else:
        entries = [(line.strip(), None) for line in text.splitlines() if line.strip()]
    tokens: dict[str, str | None] = {}
    for token, description in entries:
        if not isinstance(token, str) or not token.strip() or not isinstance(description, str | None):
            what = f"{token!r}: {description!r} is no token with a description"
            raise _refusal(path, f"{what}; put both in quotes")
        if token in tokens:
            raise _refusal(path, f"{token!r} is there twice; keep one")
        tokens[token] = description or None
    if not tokens:
        raise _refusal(path, "it holds no token; write one a line")
    return tokens


def _text_of(path: str) -> str:
    try:
        return Path(path or "\0").read_text(encoding="utf-8")  # the path of nothing is this folder's
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except ValueError:
        reason = "no name of a file"
    raise _refusal(path, f"{reason}; give a file of tokens")


def _refusal(path: str, why: str) -> InputError:
    return InputError(f"add_tokens is {path!r}: {why}", about="add_tokens")


def _entries(path: str, text: str, kind: str) -> list[tuple[Any, Any]]:
    import yaml

    try:
        if kind == "json":  # of an object with a name twice, json keeps the last
            found = json.loads(text, object_pairs_hook=lambda pairs: pairs)
            is_list = isinstance(found, list) and not all(isinstance(each, tuple) for each in found)
            return [(each, None) for each in found] if is_list else list(found)
        node, found = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        remedy = "correct it, or write one token a line into a file of another name"
        raise _refusal(path, f"not {kind}; {remedy}") from None
    if isinstance(found, Mapping) and isinstance(node, yaml.MappingNode):
        return [(name.value, found.get(name.value)) for name, _ in node.value]
    return [(each, None) for each in found] if isinstance(found, list) else []
