"""Which private names of other libraries are not there in the installed releases."""

import pkgutil
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from unsloth_pack.cli.private_names import PrivateName


def missing_names(names: Iterable[PrivateName]) -> list[PrivateName]:
    """Those of the names that the installed libraries do not have.

    Modules written in Python are read and not imported, which would take seconds.

    Args:
        names: of libraries that are installed.
    """
    import torch

    has_cuda = torch.version.cuda is not None
    return [name for name in names if (has_cuda or not name.needs_cuda) and not _is_there(name)]


def _is_there(wanted: PrivateName) -> bool:
    if re.search(rf"\b{wanted.name}\b", _source_of(wanted.owner)):
        return True
    try:
        return hasattr(pkgutil.resolve_name(wanted.owner), wanted.name)
    except (ImportError, AttributeError):
        return False


def _source_of(module: str) -> str:
    """The text of a module; empty where there is no such module, or it is not written in Python."""
    library, *inside = module.split(".")
    found = find_spec(library)
    if found is None or not found.submodule_search_locations:
        return ""
    path = Path(found.submodule_search_locations[0], *inside)
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""
