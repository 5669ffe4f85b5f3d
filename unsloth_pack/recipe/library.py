"""The recipes that come with the package: config files to run as they are, or to copy and change."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.config_file import BASE
from unsloth_pack.recipe.folders import check_writable

_FOLDER = files("unsloth_pack") / "recipes"
_SUFFIX = ".yaml"


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return sorted(
        file.name.removesuffix(_SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(_SUFFIX)
    )


def recipe_text(name: str) -> str:
    """The file of a recipe.

    Raises:
        InputError: there is none of that name.
    """
    return _file_of(name).read_text(encoding="utf-8")


def summary_of(name: str) -> str:
    """What a recipe is for: its first line."""
    return recipe_text(name).partition("\n")[0].removeprefix("# ")


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe and the files that it builds on into a folder, which is made where it is missing.

    Args:
        target: the folder; or a name for the recipe's own file, which ends in .yaml or .yml.

    Returns:
        The files, the recipe's own first. One that is there with the same content stays.

    Raises:
        InputError: there is no such recipe, another file of that name is there, or nothing can be written.
    """
    is_file = target.suffix in (_SUFFIX, ".yml") and not target.is_dir()
    folder = target.parent if is_file else target
    check_writable("folder", folder)
    names = [name.removesuffix(_SUFFIX)]
    for each in names:  # grows on the way
        bases = yaml.safe_load(recipe_text(each)).get(BASE, [])
        names += [base.removesuffix(_SUFFIX) for base in ([bases] if isinstance(bases, str) else bases)]
    own, *bases = (folder / f"{each}{_SUFFIX}" for each in names)
    own = target if is_file else own
    if own in bases:
        raise InputError(f"{str(own)!r} is the name of a file that the recipe builds on; give another name")
    texts = dict(zip([own, *bases], map(recipe_text, names), strict=True))
    try:
        new = [path for path, text in texts.items() if not _holds(path, text)]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(texts[path])
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot hold the recipe ({error}); give another folder") from None
    return [*texts]


def _holds(path: Path, text: str) -> bool:
    """Whether a file holds this text; False if it is not there.

    Raises:
        InputError: something else is there.
    """
    if not path.exists() and not path.is_symlink():
        return False
    if path.is_file() and path.read_bytes() == text.encode():
        return True
    raise InputError(f"{str(path)!r} is there already; give another folder, or move it")


def _file_of(name: str) -> Traversable:
    names = recipe_names()
    if name.removesuffix(_SUFFIX) not in names:
        raise InputError(f"there is no recipe {name!r}; choose one of {', '.join(names)}")
    return _FOLDER / f"{name.removesuffix(_SUFFIX)}{_SUFFIX}"
