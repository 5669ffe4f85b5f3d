"""Config files: YAML whose lines are `name: value`, a value for an option of that name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError

_FLAGS_ONLY = ("config", "debug", "help")


def read_config_file(path: Path) -> dict[str, Any]:
    """The values in a config file, by name, of the types that YAML gives them.

    Raises:
        InputError: it cannot be read, is no YAML, has a name twice, or has a name that is for flags only.
    """
    import yaml

    if path.exists() and not path.is_file():
        raise InputError(f"config is {str(path)!r}: no ordinary file; write one")
    try:
        text = path.read_text(encoding="utf-8")
        node, values = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"config is {str(path)!r}: {error.strerror}; check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)  # not the line itself, which may hold a secret
        place = f" (line {mark.line + 1})" if mark else ""
        raise InputError(f"config is {str(path)!r}: not yaml{place}; correct it") from None
    if node is None or not isinstance(values, Mapping):
        raise InputError(f"config is {str(path)!r}: it holds no `name: value` lines; write one an option")
    names = [name.value for name, _ in node.value]
    for name in names:
        if name in _FLAGS_ONLY:
            raise InputError(
                f"config is {str(path)!r}: {name} cannot be set there; give it on the command line"
            )
        if names.count(name) > 1:
            raise InputError(f"config is {str(path)!r}: {name} is there twice; keep one")
    return {str(name): value for name, value in values.items()}
