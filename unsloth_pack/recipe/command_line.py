"""From the command line of `train` to the options of a run."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.errors import InputError, Mistakes, mistakes_of
from unsloth_pack.recipe.checks import check_anywhere, check_names
from unsloth_pack.recipe.config_file import BASE, check_mappings, merged, read_config
from unsloth_pack.recipe.flags import add_flags, build, options_of
from unsloth_pack.recipe.mistakes import Found, Place
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.other_trainers import REMEDIES
from unsloth_pack.recipe.overrides import split_overrides
from unsloth_pack.recipe.parser import Parser
from unsloth_pack.recipe.resolve import resolve
from unsloth_pack.recipe.yaml_file import Placed


def read_options(arguments: Sequence[str]) -> TrainOptions:
    """The options of a run, with all defaults filled in but those that depend on the device.

    A value comes from the command line, else from the config file, else from the run that is resumed or from
    the demo, else it is the default.

    Args:
        arguments: of the command line.

    Raises:
        InputError: an unknown option, a value out of range, a config file that cannot be read, a resumed run
            that is not there or was started otherwise, or options that contradict each other.
    """
    placed = placed_options(train_parser(), arguments)
    with telling_places(placed):
        return resolve(values_of(placed))


@contextmanager
def telling_places(placed: Mapping[str, Placed]) -> Iterator[None]:
    """Of mistakes that are found meanwhile, tell the line of the config file that gave what they are about.

    Raises:
        Mistakes: in place of an InputError about an option of a file.
    """
    try:
        yield
    except InputError as error:
        found = [(_place_of(each, placed), each) for each in mistakes_of(error)]
        if not any(place for place, _ in found):
            raise
        found.sort(key=lambda each: (each[0] is None, each[0] or Place("", 0)))
        told = [InputError(f"{place}: {_of_a_file(each)}") if place else each for place, each in found]
        raise Mistakes(told) from error


def _of_a_file(error: InputError) -> str:
    """What an error says, with the names of options where it has those of their flags."""
    known = options_of(TrainOptions)
    return re.sub(r"--(\w+)", lambda flag: flag[1] if flag[1] in known else flag[0], str(error))


def _place_of(error: InputError, placed: Mapping[str, Placed]) -> Place | None:
    """Of the first option of a file that the error is about."""
    for option in error.about:
        name, _, part = option.partition(".")
        if name in placed and (place := placed[name].place_of(part)):
            return place
    return None


def train_parser(epilog: str = "") -> Parser:
    """The parser of `train`'s flags; `epilog` ends its help."""
    defaults = ", ".join(f"{name} {value}" for name, value in DEMO_DEFAULTS.items())
    parser = Parser(
        REMEDIES,
        prog="unsloth-pack",
        usage="unsloth-pack [train] [flags]",
        description="Fine-tune a language model with a LoRA adapter. Without flags, the bundled model trains "
        f"on the bundled data, with defaults of its own: {defaults}. On your own data: unsloth-pack "
        "--model_name MODEL --dataset DATA --sample_packing. A [true|false] flag that stands alone is true.",
        epilog=epilog,
    )
    add_flags(parser, TrainOptions)
    return parser


def given_options(parser: Parser, arguments: Sequence[str]) -> dict[str, Any]:
    """What the flags say, and the config file that they name, by the names of the options."""
    return values_of(placed_options(parser, arguments))


def values_of(placed: Mapping[str, Placed]) -> dict[str, Any]:
    """The values alone, without those that restore a default."""
    given = {name: each.plain for name, each in placed.items() if each.value is not None}
    known = options_of(TrainOptions)
    return {
        name: known[name].kind(value) if isinstance(value, dict) else value for name, value in given.items()
    }


def placed_options(parser: Parser, arguments: Sequence[str]) -> dict[str, Placed]:
    """The same with the place of each value, None for the command line. A value of None restores the default.

    Raises:
        InputError: an unknown flag, a value that its flag does not take, or a file that cannot be opened.
        Mistakes: all that is wrong in the config file and its base files.
    """
    rest, set_inside = split_overrides(arguments, TrainOptions)
    flags = parser.parse(rest)
    found, values = Found(), dict[str, Placed]()
    if flags.get("config") == "":
        raise InputError("config is '': no name of a file; check the path")
    if flags.get("config") is not None:
        _refuse_two_configs(rest)
        values = read_config(Path(flags["config"]), TrainOptions, found)
    values = merged(merged(values, _from_command_line(flags)), set_inside)
    values = {name: _with_nulls_that_mean_something(name, placed) for name, placed in values.items()}
    check_mappings(values, TrainOptions, found)
    if found:
        _note_what_else_is_sure(values, found)
    found.check()
    return values


def _note_what_else_is_sure(values: Mapping[str, Placed], found: Found) -> None:
    """Note what `check_names` refuses, and options that contradict each other, beside the mistakes that were
    found in the file."""
    told = [name for name in options_of(TrainOptions) if name in found.options]
    given = values_of({name: each for name, each in values.items() if name not in told})
    options = build(TrainOptions, given)
    together = _refused_by(partial(check_anywhere, options, given))
    # What lacks another option may lack it because that is misspelt
    sure = [each for each in together if _names_several(each, given)]
    if "lr_scheduler_type" not in given:
        told.append("lr_scheduler_type")  # the demo has another default, and who knows whether it is meant
    for each in [*_refused_by(partial(check_names, options, given, told)), *sure]:
        if place := _place_of(each, values):
            found.add(place, *_of_a_file(each).split("; ", 1))


def _refused_by(check: Callable[[], None]) -> list[InputError]:
    try:
        check()
    except InputError as error:
        return [*mistakes_of(error)]
    return []


def _names_several(error: InputError, given: Mapping[str, Any]) -> bool:
    """Whether an error is about several options, and all of them were given."""
    names = {name.partition(".")[0] for name in error.about}
    return len(names) > 1 and names <= given.keys()


def _with_nulls_that_mean_something(name: str, placed: Placed) -> Placed:
    """A mapping in which null does not restore a default, with what it means in its place."""
    meant = options_of(TrainOptions)[name].kind.null_inside
    if meant is None or not isinstance(placed.value, dict):
        return placed
    inside = {part: Placed(meant, it.place) if it.value is None else it for part, it in placed.value.items()}
    return Placed(inside, placed.place)


def _from_command_line(flags: Mapping[str, Any]) -> dict[str, Placed]:
    """The flags without places; what is set inside a mapping merges like a file's."""
    return {
        name: Placed(_from_command_line(value) if isinstance(value, dict) else value, None)
        for name, value in flags.items()
    }


def _refuse_two_configs(arguments: Sequence[str]) -> None:
    if sum(argument.partition("=")[0] == "--config" for argument in arguments) > 1:
        raise InputError(f"config is given twice; give one file, and name the other in its {BASE}")
