"""Dotted flags: `--training.learning_rate 1e-4` names an option and its section, and
`--loftq_config.loftq_bits 4` a part of an option that is a mapping."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.config_file import merged
from unsloth_pack.recipe.flags import options_of, section_names
from unsloth_pack.recipe.yaml_file import Placed, scalar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def split_overrides(
    arguments: Sequence[str], kind: "type[DataclassInstance]"
) -> tuple[list[str], dict[str, Placed]]:
    """The arguments with sections taken from their names, and what is set inside of mappings.

    A dotted flag that names no option stays, without its section, for the parser to refuse.

    Raises:
        InputError: the option is in another section or no mapping, or a value is missing.
    """
    rest: list[str] = []
    set_inside: dict[str, Placed] = {}
    left = list(arguments)
    while left:
        argument = left.pop(0)
        flag, equals, value = argument.partition("=")
        names = flag.removeprefix("--").split(".")
        section = _section_of(names, kind)
        option = options_of(kind).get(names[len(section)]) if len(section) < len(names) else None
        inside = names[len(section) + 1 :]
        if not flag.startswith("--") or len(names) == 1:
            rest.append(argument)
            continue
        if option is None:
            rest.append(f"--{'.'.join(names[len(section) :] or names)}{equals}{value}")
            continue
        if section and section != option.path[:-1]:
            home = ".".join(option.path[:-1])
            raise InputError(f"argument {flag}: {option.name} is in {home}; give --{option.name}")
        if not inside:
            rest.append(f"--{option.name}{equals}{value}")
            continue
        if not option.takes_mapping:
            raise InputError(f"argument {flag}: {option.name} is no mapping; give --{option.name}")
        if not equals and (not left or left[0].startswith("--")):
            raise InputError(f"argument {flag}: a value is missing; give one")
        if option.kind.has_dotted_names:
            inside = [".".join(inside)]
        later = _nested([option.name, *inside], value if equals else left.pop(0))
        set_inside = merged(set_inside, later, upper_first=False)
    return rest, set_inside


def _section_of(names: Sequence[str], kind: "type[DataclassInstance]") -> tuple[str, ...]:
    """The longest section that the names begin with."""
    found = (tuple(names[:length]) for length in range(len(names), 0, -1))
    return next((each for each in found if each in section_names(kind)), ())


def _nested(names: Sequence[str], text: str) -> dict[str, Placed]:
    value = Placed(scalar(text), None)
    for name in reversed(names[1:]):
        value = Placed({name: value}, None)
    return {names[0]: value}
