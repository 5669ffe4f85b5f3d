"""Names that transformers knows, read from its source: importing it takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def names_in(module: str, name: str) -> list[str]:
    """The values of an enumeration, or the keys of a dict, in a module of transformers."""
    library: Any = find_spec("transformers")
    path = Path(*library.submodule_search_locations, f"{module}.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        values: list[Any] = []
        if isinstance(node, ast.ClassDef) and node.name == name:
            values = [each.value for each in node.body if isinstance(each, ast.Assign)]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            values = node.value.keys if [getattr(each, "id", "") for each in node.targets] == [name] else []
        if values:
            return [str(each.value) for each in values if isinstance(each, ast.Constant)]
    raise ImportError(f"{path} has no {name}")
