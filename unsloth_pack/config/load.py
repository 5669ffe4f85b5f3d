"""From a command line, its config file and its base files to the options that somebody asked for."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unsloth_pack.config.files import BASE, Source, merged, read_files, why_not_open
from unsloth_pack.config.options import ALIASES, OPTIONS, SECTIONS, Place, TrainOptions, nearest, nested
from unsloth_pack.config.parser import Parser, train_parser
from unsloth_pack.config.values import explained
from unsloth_pack.config.yaml12 import scalar
from unsloth_pack.errors import InputError, Mistakes, mistakes_of


def load(
    arguments: Sequence[str],
    parser: Parser | None = None,
    check: Callable[[TrainOptions, set[str]], None] | None = None,
) -> TrainOptions:
    """Read the options that a command line asks for; the others have the defaults of their types.

    A value comes from the command line, else from the config file, else from its base files.

    Args:
        parser: of the flags; that of `train` by default.
        check: refuses options that contradict each other, to tell it beside other mistakes. Takes the options
            that are right, and the names of those that are wrong.

    Raises:
        Mistakes: all that is wrong.
        InputError: the config file cannot be opened.
    """
    flags, inside = _undotted(arguments)
    own = (parser or train_parser()).parse(flags)
    files = _files(own["config"], flags) if own.get("config") is not None else []
    for source in files:
        for at, text in _validated(source.values)[1]:
            source.note(nearest(at, source.lines) or 1, text, at.partition(".")[0])
    wrong = {name for source in files for name in source.wrong}
    values, places = _merged([*reversed(files), Source("", own), Source("", inside)])
    options, errors = _validated({name: value for name, value in values.items() if name not in wrong})
    options._places, options._files = places, [source.file for source in files]
    found: list[tuple[Place | None, str]] = [
        ((source.file, line), text) for source in files for line, text in source.mistakes
    ]
    found += [(options.place_of(at), text) for at, text in errors]
    if found and check is not None:
        try:
            check(options, wrong)
        except InputError as error:
            found += [each for each in _placed(error, options) if each[0]]
    if found:
        raise _mistakes(found, options)
    return options


def read_record(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Read the options that an earlier run wrote down, by name, without those that are None.

    Args:
        source: where they stand, to begin an error message.

    Raises:
        Mistakes: values that the options do not take.
    """
    options, errors = _validated(values)
    if errors:
        raise Mistakes([InputError(f"{source}: {text}") for _, text in errors])
    return options.given


def _files(path: str, flags: Sequence[str]) -> list[Source]:
    """The config file and its base files, those that win first."""
    if sum(flag.partition("=")[0] == "--config" for flag in flags) > 1:
        raise InputError(f"config is given twice; give one file, and name the other in its {BASE}")
    try:
        return [*read_files(Path(path or "\0"))]
    except (OSError, ValueError) as error:
        raise InputError(f"config is {path!r}: {why_not_open(error)}; check the path") from None


def _validated(values: Mapping[str, Any]) -> tuple[TrainOptions, list[tuple[str, str]]]:
    """The options with those values that are right; of each mistake its option and part, and what it is."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, dict) and name != "columns":  # of which null leaves out a column of the data
            given[name] = {part: each for part, each in value.items() if each is not None}
    try:
        return TrainOptions.model_validate(nested(given)), []
    except ValidationError as error:
        found = [
            (at, f"{': '.join(filter(None, (at.partition('.')[0], words)))} is {end}")
            for at, words, end in explained(error, 2)
        ]
    wrong = {at.partition(".")[0] for at, _ in found}
    return _validated({name: value for name, value in given.items() if name not in wrong})[0], found


def _merged(sources: Sequence[Source]) -> tuple[dict[str, Any], dict[str, Place | None]]:
    """The values of sources, of which the last wins, and where they stand."""
    values: dict[str, Any] = {}
    places: dict[str, Place | None] = {}
    for source in sources:
        for name, value in source.values.items():
            if isinstance(value, dict) and isinstance(values.get(name), dict):
                places |= dict.fromkeys(f"{name}.{part}" for part in value)
            else:
                places = {at: place for at, place in places.items() if at.partition(".")[0] != name}
        places |= {at: (source.file, line) for at, line in source.lines.items()}
        values = merged(values, source.values)
    return values, places


def _undotted(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The flags without sections in their names, and what `--optim_args.eps 1e-6` sets inside of mappings."""
    flags: list[str] = []
    inside: dict[str, Any] = {}
    left = list(arguments)
    while left:
        argument = left.pop(0)
        flag, equals, value = argument.partition("=")
        names = flag.removeprefix("--").split(".")
        section = names.pop(0) if names[0] in SECTIONS and len(names) > 1 else ""
        option = OPTIONS.get(ALIASES.get(names[0], names[0]))
        if not flag.startswith("--") or "." not in flag:
            flags.append(argument)
        elif option and section not in ("", option.section):
            raise InputError(f"argument {flag}: {names[0]} is in {option.section}; give --{names[0]}")
        elif option is None or len(names) == 1:
            flags.append(f"--{'.'.join(names)}{equals}{value}")
        elif dict not in option.types:
            raise InputError(f"argument {flag}: {names[0]} is no mapping; give --{names[0]}")
        elif not equals and (not left or left[0].startswith("--")):
            raise InputError(f"argument {flag}: a value is missing; give one")
        else:
            part = inside.setdefault(option.name, {})
            part[".".join(names[1:])] = scalar(value if equals else left.pop(0))
    return flags, inside


@contextmanager
def telling_places(options: TrainOptions) -> Iterator[None]:
    """Inside this context, tell of each mistake the line of the config file that gave what it is about.

    Raises:
        Mistakes: in place of an InputError about an option of a file.
    """
    try:
        yield
    except InputError as error:
        found = _placed(error, options)
        if not any(place for place, _ in found):
            raise
        raise _mistakes(found, options) from error


def _placed(error: InputError, options: TrainOptions) -> list[tuple[Place | None, str]]:
    """Of each mistake, the place of the first option of a file that it is about, and what it says."""
    found = []
    for each in mistakes_of(error):
        place, text = next(filter(None, map(options.place_of, each.about)), None), str(each)
        if place:  # files name options, not flags
            text = re.sub(r"--(\w+)", lambda flag: flag[1] if flag[1] in OPTIONS else flag[0], text)
        found.append((place, text))
    return found


def _mistakes(found: list[tuple[Place | None, str]], options: TrainOptions) -> Mistakes:
    """All mistakes in the order of files and lines, then those of the command line."""

    def order(mistake: tuple[Place | None, str]) -> tuple[int, int]:
        place, _ = mistake
        return (options._files.index(place[0]), place[1]) if place else (len(options._files), 0)

    said = sorted(dict.fromkeys(found), key=order)
    return Mistakes([InputError(f"{at[0]}:{at[1]}: {text}" if at else text) for at, text in said])
