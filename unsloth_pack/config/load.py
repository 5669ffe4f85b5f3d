"""From a command line, its config file and its base files to the options of a run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unsloth_pack.config.files import Source, read_file
from unsloth_pack.config.options import ALIASES, OPTIONS, Place, TrainOptions, validated
from unsloth_pack.config.parser import Parser, train_parser
from unsloth_pack.errors import InputError, Mistakes

_MAPPINGS = "|".join(name for name, option in OPTIONS.items() if dict in option.types)
_WORD = re.compile(r"(?:(?<=--)|(?<![\w./-]))\w+(?![\w/-]|\.\w)")  # of a text, not of a path in it
_PART = re.compile(rf"--(?:\w+\.)?({_MAPPINGS})\.([^=]+)(?:=(.*))?", re.DOTALL)


def load(arguments: Sequence[str], parser: Parser | None = None) -> TrainOptions:
    """Read the options of a command line; the others have the defaults of their types.

    A value comes from the command line, else from the config file, else from its base files. Mistakes in
    names and values are raised together.
    """
    flags, parts = _without_parts(arguments)
    own = (parser or train_parser()).read(flags)
    whole, path = Source(), own.get("config")
    if path is not None:
        try:
            whole = read_file(Path(path).expanduser())
        except OSError as error:
            raise InputError(f"config is {path!r}: {error.strerror}; check the path") from None
    whole.update(Source(own))
    whole.update(Source(parts))
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


def _without_parts(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take the parts of mappings, as of `--optim_args.eps 1e-6`, from the other flags."""
    flags: list[str] = []
    parts: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        if part := _PART.fullmatch(word):
            name, key, value = part.groups()
            value = next(words, None) if value is None else value
            if value is None:
                raise InputError(f"argument {word}: expected one argument; give it a value")
            parts.setdefault(name, {})[key] = None if value == "null" else value
        else:
            flags.append(word)
    return flags, parts


@contextmanager
def telling_places(options: TrainOptions) -> Iterator[None]:
    """Inside this context, put before each mistake the line of the config file of the option that it names.

    Raises:
        Mistakes: in place of an InputError about an option of a file.
    """
    try:
        yield
    except InputError as error:
        placed = [(_place(options, str(each)), str(each)) for each in error.errors]
        if not any(place for place, _ in placed):
            raise
        raise _mistakes(placed) from error


def _place(options: TrainOptions, mistake: str) -> Place | None:
    """The place of the first option that a mistake names outside of quotes and of its remedy."""
    words = _WORD.findall(re.sub(r"'[^']*'", "''", mistake.partition("; ")[0]))
    return next(filter(None, (options.place_of(ALIASES.get(word, word)) for word in words)), None)


def _mistakes(placed: Sequence[tuple[Place | None, str]]) -> Mistakes:
    """All mistakes in the order of files and lines, then those of the command line."""
    said = sorted(dict.fromkeys(placed), key=lambda each: (each[0] is None, each[0] or ("", 0)))
    return Mistakes(InputError(f"{at[0]}:{at[1]}: {text}" if at else text) for at, text in said)
