"""From a command line, its config file and its base files to the options of a run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unsloth_pack.config.files import Source, read_file
from unsloth_pack.config.options import ALIASES, OPTIONS, SECTIONS, Place, TrainOptions, names_in, validated
from unsloth_pack.config.parser import Parser, train_parser
from unsloth_pack.config.values import mapping
from unsloth_pack.errors import InputError, Mistakes

_MAPPINGS = "|".join(name for name, option in OPTIONS.items() if dict in option.types)
_PART = re.compile(rf"--(?:\w+\.)?({_MAPPINGS})\.([^=]+)(?:=(.*))?", re.DOTALL)
_IN_SECTION = re.compile(rf"--({'|'.join(SECTIONS)})\.(\w+)")


def load(arguments: Sequence[str], parser: Parser | None = None) -> TrainOptions:
    """Read the options of a command line; the others have the defaults of their types.

    A value comes from the command line, else from the config file, else from its base files. Mistakes in
    names and values are raised together.
    """
    flags, parts = _undotted(arguments)
    own = (parser or train_parser()).read(flags)
    whole, path = Source(), own.get("config")
    if path is not None:
        try:
            whole = read_file(Path(path).expanduser())
        except OSError as error:
            raise InputError(f"config is {path!r}: {error.strerror}; check the path") from None
    for values in (own, parts):
        whole.update(Source({n: mapping(v) if dict in OPTIONS[n].types else v for n, v in values.items()}))
    options, errors = validated(whole.values)
    options._places = whole.places
    if errors or whole.mistakes:
        raise _mistakes([*whole.mistakes, *((options.place_of(at), text) for at, text in errors)])
    return options


def read_record(values: Mapping[str, object], source: str) -> dict[str, Any]:
    """Read the options in the record of an earlier run, by name. Raises Mistakes that begin with `source`."""
    options, errors = validated(values)
    if errors:
        raise Mistakes(InputError(f"{source}: {text}") for _, text in errors)
    return options.given


def _undotted(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The flags without sections in their names, and the parts of mappings, as of `--optim_args.eps 1e-6`."""
    flags: list[str] = []
    parts: dict[str, Any] = {}
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if part := _PART.fullmatch(argument):
            name, key, value = part.groups()
            if value is None and not left:
                raise InputError(f"argument {argument}: expected one argument; give it a value")
            value = left.pop(0) if value is None else value
            parts.setdefault(name, {})[key] = None if value == "null" else value
        elif (flag := _IN_SECTION.match(argument)) and _is_in(flag[1], flag[2]):
            flags.append(f"--{argument.partition('.')[2]}")
        else:
            flags.append(argument)
    return flags, parts


def _is_in(section: str, name: str) -> bool:
    option = OPTIONS.get(ALIASES.get(name, name))
    return option is not None and option.section == section


@contextmanager
def telling_places(options: TrainOptions) -> Iterator[None]:
    """Inside this context, put before each mistake the line of the config file of the option that it names.

    Raises:
        Mistakes: in place of an InputError about an option of a file.
    """
    try:
        yield
    except InputError as error:
        named = [(names_in(str(each).partition("; ")[0]), str(each)) for each in error.errors]
        placed = [(next(filter(None, map(options.place_of, names)), None), text) for names, text in named]
        if not any(place for place, _ in placed):
            raise
        raise _mistakes(placed) from error


def _mistakes(placed: Sequence[tuple[Place | None, str]]) -> Mistakes:
    """All mistakes in the order of files and lines, then those of the command line."""
    said = sorted(dict.fromkeys(placed), key=lambda each: (each[0] is None, each[0] or ("", 0)))
    return Mistakes(InputError(f"{at[0]}:{at[1]}: {text}" if at else text) for at, text in said)
