"""The user's function of a run whose objective is rollouts."""

import importlib
import runpy

from unsloth_pack.errors import InputError, first_line
from unsloth_pack.training.rollouts import Target


def load_function(named: str | None) -> Target:
    """Import the function that FILE.py:NAME or MODULE:NAME names.

    Raises:
        InputError: it is not there, or its file cannot be imported.
    """
    source, _, name = (named or "").rpartition(":")
    if not source or not name:
        raise InputError(f"rollout_function is {named!r}; give FILE.py:NAME of a function")
    try:
        is_file = source.endswith(".py")
        names = runpy.run_path(source) if is_file else vars(importlib.import_module(source))
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"rollout_function {named!r} cannot be imported ({why}); correct it") from error
    function: Target | None = names.get(name)
    if not callable(function):
        raise InputError(f"rollout_function is {named!r}, and {source} has no function {name}; correct it")
    return function
