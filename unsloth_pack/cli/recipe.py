"""`unsloth-pack recipe`: the config files that come with the package."""

from collections.abc import Sequence
from pathlib import Path

from unsloth_pack.errors import InputError, printable
from unsloth_pack.recipe.kinds import path
from unsloth_pack.recipe.library import copy_recipe, recipe_names, recipe_text, summary_of
from unsloth_pack.recipe.parser import Parser

ACTIONS = {
    "list": "name every recipe, and what it is for",
    "show": "print the file of one",
    "copy": "copy it, and the files that it builds on, into a folder (default: this one), or as FILE.yaml",
}


def run(arguments: Sequence[str]) -> int:
    """List, print or copy recipes.

    Raises:
        InputError: no such recipe, or a file is in the way of a copy.
    """
    given = _parser().parse(arguments)
    action, name = given.get("action") or "list", given.get("name")
    if action not in ACTIONS:
        raise InputError(f"recipe has no action {action!r}; use one of {', '.join(ACTIONS)}")
    if action == "list":
        if name is not None:
            raise InputError(f"recipe list takes no name and is given {name!r}; give it to show or copy")
        _list()
    elif name is None:
        raise InputError(f"recipe {action} is given no name; choose one of {', '.join(recipe_names())}")
    elif action == "show":
        print(recipe_text(name), end="")
    else:
        copied = copy_recipe(name, Path(given.get("target") or "."))
        also = f" (with {', '.join(str(each) for each in copied[1:])})" if copied[1:] else ""
        print(printable(f"copied to {copied[0]}{also}; run it with: unsloth-pack --config {copied[0]}"))
    return 0


def _list() -> None:
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {summary_of(name)}")


def _parser() -> Parser:
    actions = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    parser = Parser(
        prog="unsloth-pack recipe",
        usage="unsloth-pack recipe list | show NAME | copy NAME [FOLDER | FILE.yaml]",
        description=f"Config files to run, or to copy and change. {actions}.",
    )
    parser.add_argument("action", nargs="?", metavar="ACTION", help="list, show or copy (default: list)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a recipe, as list prints it")
    parser.add_argument(
        "target", nargs="?", type=path, metavar="FOLDER", help="to copy into, or FILE.yaml (default: .)"
    )
    return parser
