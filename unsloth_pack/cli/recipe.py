"""`unsloth-pack recipe`: the config files that come with the package."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import yaml

from unsloth_pack.config import Parser
from unsloth_pack.config.files import BASE
from unsloth_pack.config.values import FilePath
from unsloth_pack.errors import InputError, printable
from unsloth_pack.run.machine import check_writable

ACTIONS = {
    "list": "name every recipe, and what it is for",
    "show": "print the file of one",
    "copy": "copy it, and the files that it builds on, into a folder (default: this one), or as FILE.yaml",
}
_FOLDER = files("unsloth_pack") / "recipes"


def run(arguments: Sequence[str]) -> int:
    """List, print or copy recipes."""
    words = build_parser().parse(arguments)
    action, name = words.get("action") or "list", words.get("name")
    if action not in ACTIONS:
        raise InputError(f"recipe has no action {action!r}; use one of {', '.join(ACTIONS)}")
    if action == "list":
        width = max(map(len, recipe_names()))
        print(*(f"{each:{width}}  {summary_of(each)}" for each in recipe_names()), sep="\n")
    elif name is None:
        raise InputError(f"recipe {action} is given no name; choose one of {', '.join(recipe_names())}")
    elif action == "show":
        print(recipe_text(name), end="")
    else:
        copied = _copy(name, Path(words.get("target") or "."))
        also = f" (with {', '.join(map(str, copied[1:]))})" if copied[1:] else ""
        print(printable(f"copied to {copied[0]}{also}; run it with: unsloth-pack --config {copied[0]}"))
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    actions = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    parser = Parser(
        prog="unsloth-pack recipe",
        usage="unsloth-pack recipe list | show NAME | copy NAME [FOLDER | FILE.yaml]",
        description=f"Config files to run, or to copy and change. {actions}.",
    )
    parser.add_argument("action", nargs="?", metavar="ACTION", help="list, show or copy (default: list)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a recipe, as list prints it")
    parser.add_argument(
        "target", nargs="?", type=FilePath, metavar="FOLDER", help="to copy into, or FILE.yaml (default: .)"
    )
    return parser


def recipe_names() -> list[str]:
    """List the names of all recipes."""
    names = [file.name for file in _FOLDER.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Read the file of a recipe."""
    name = name.removesuffix(".yaml")
    if name not in recipe_names():
        raise InputError(f"there is no recipe {name!r}; choose one of {', '.join(recipe_names())}")
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def summary_of(name: str) -> str:
    """Return the first line of a recipe, which says what it is for."""
    return recipe_text(name).partition("\n")[0].removeprefix("# ")


def _copy(name: str, target: Path) -> list[Path]:
    """Copy a recipe and the files that it builds on, and return the files, the recipe's own first.

    A file with the same content stays. `target` is a folder, or the name of the recipe's own file.
    """
    is_file = target.suffix in (".yaml", ".yml") and not target.is_dir()
    folder = target.parent if is_file else target
    check_writable("folder", folder)
    names = [f"{name.removesuffix('.yaml')}.yaml"]
    for each in names:  # grows on the way
        bases = yaml.safe_load(recipe_text(each)).get(BASE, [])
        names += [bases] if isinstance(bases, str) else bases
    paths = [target if is_file else folder / names[0], *(folder / each for each in names[1:])]
    texts = dict(zip(paths, map(recipe_text, names), strict=True))
    if len(texts) < len(paths):
        raise InputError(f"{str(target)!r} is a file that the recipe builds on; give another name")
    for path, text in texts.items():
        if os.path.lexists(path) and not (path.is_file() and path.read_text(encoding="utf-8") == text):
            raise InputError(f"{str(path)!r} is there already; give another folder, or move it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return paths
