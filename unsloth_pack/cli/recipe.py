"""`unsloth-pack recipe`: the config files that come with the package."""

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
    words = _parser().parse(arguments)
    action, name = words.get("action") or "list", words.get("name")
    if action not in ACTIONS:
        raise InputError(f"recipe has no action {action!r}; use one of {', '.join(ACTIONS)}")
    if action == "list":
        if name is not None:
            raise InputError(f"recipe list takes no name and is given {name!r}; give it to show or copy")
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
    if paths[0] in paths[1:]:
        raise InputError(f"{str(paths[0])!r} is a file that the recipe builds on; give another name")
    texts = dict(zip(paths, map(recipe_text, names), strict=True))
    try:
        new = [path for path, text in texts.items() if not _holds(path, text)]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(texts[path])
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot hold the recipe ({error}); give another folder") from None
    return paths


def _holds(path: Path, text: str) -> bool:
    """Return whether a file holds this text; refuse if it holds another."""
    if not path.exists() and not path.is_symlink():
        return False
    if path.is_file() and path.read_bytes() == text.encode():
        return True
    raise InputError(f"{str(path)!r} is there already; give another folder, or move it")
