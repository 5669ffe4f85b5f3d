"""From a command line, its config file and its base files to the options of a run."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unsloth_pack.config.files import BASE, Source, read_files
from unsloth_pack.config.options import ALIASES, OPTIONS, SECTIONS, Place, TrainOptions, names_in, validated
from unsloth_pack.config.parser import Parser, train_parser
from unsloth_pack.config.yaml12 import scalar
from unsloth_pack.errors import InputError, Mistakes

_PATHS = ("model_name", "dataset", "eval_dataset", "image_folder", "add_tokens", "init_adapter")


def load(
    arguments: Sequence[str],
    parser: Parser | None = None,
    check: Callable[[TrainOptions, set[str]], None] | None = None,
) -> TrainOptions:
    """Read the options of a command line; the others have the defaults of their types.

    A value comes from the command line, else from the config file, else from its base files.

    Args:
        parser: of the flags; that of `train` by default.
        check: refuses options that contradict each other, beside other mistakes. Takes the options without
            those that are wrong, and the names of these.

    Raises:
        Mistakes: all that is wrong.
        InputError: the config file cannot be opened.
    """
    flags, inside = _undotted(arguments)
    own = (parser or train_parser()).parse(flags)
    files = _files(own["config"], flags) if own.get("config") is not None else []
    values, places = _merged([*reversed(files), Source("", own), Source("", inside)])
    mistakes: list[tuple[Place | None, str]]
    mistakes = [((source.file, line), text) for source in files for line, text in source.mistakes]
    wrong = {name for _, text in mistakes for name in names_in(text)}
    options, errors = validated({name: value for name, value in values.items() if name not in wrong})
    options._places, options._files = places, [source.file for source in files]
    mistakes += [(options.place_of(at), text) for at, text in errors]
    if mistakes and check is not None:
        try:
            check(options, wrong | {at.partition(".")[0] for at, _ in errors})
        except InputError as error:
            mistakes += [each for each in _placed(error, options) if each[0]]
    if mistakes:
        raise _mistakes(mistakes, options)
    return options


def read_record(values: Mapping[str, object], source: str) -> dict[str, Any]:
    """Read the options in the record of an earlier run, by name, without those that are None.

    Args:
        source: of the record, to begin an error message.

    Raises:
        Mistakes: values that the options do not take.
    """
    options, errors = validated(values)
    if errors:
        raise Mistakes(InputError(f"{source}: {text}") for _, text in errors)
    return options.given


def _files(path: str, flags: Sequence[str]) -> list[Source]:
    """The config file and its base files, those that win first."""
    if sum(flag.partition("=")[0] == "--config" for flag in flags) > 1:
        raise InputError(f"config is given twice; give one file, and name the other in its {BASE}")
    try:
        return [*read_files(Path(path))]
    except OSError as error:
        raise InputError(f"config is {path!r}: {error.strerror}; check the path") from None


def _merged(sources: Sequence[Source]) -> tuple[dict[str, Any], dict[str, Place | None]]:
    """Merge the values of sources, of which the last wins, and their places."""
    values: dict[str, Any] = {}
    places: dict[str, Place | None] = {}
    for source in sources:
        for name, value in source.values.items():
            lower = values.get(name)
            if isinstance(value, dict) and isinstance(lower, dict):
                # The upper parts come first: of patterns the first match counts
                values[name] = {**value, **{part: each for part, each in lower.items() if part not in value}}
                places |= dict.fromkeys(f"{name}.{part}" for part in value)
            else:
                values[name] = value
                places = {at: place for at, place in places.items() if at.partition(".")[0] != name}
        places |= {at: (source.file, line) for at, line in source.lines.items()}
    return values, places


def _undotted(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The flags without sections in their names, and the parts of mappings, as of `--optim_args.eps 1e-6`."""
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
    """Inside this context, put before each mistake the line of the config file that made it.

    Raises:
        Mistakes: in place of an InputError about an option of a file.
    """
    try:
        yield
    except InputError as error:
        placed = _placed(error, options)
        if not any(place for place, _ in placed):
            raise
        raise _mistakes(placed, options) from error


def _placed(error: InputError, options: TrainOptions) -> list[tuple[Place | None, str]]:
    """The place of each mistake and its text, in which files have options where flags have flags."""
    placed = []
    for text in map(str, error.errors):
        place = _place_in(text.partition("; ")[0], options)
        if place:
            text = re.sub(r"--(\w+)", lambda flag: flag[1] if flag[1] in OPTIONS else flag[0], text)
        placed.append((place, text))
    return placed


def _place_in(text: str, options: TrainOptions) -> Place | None:
    """The file and line of the first option that a message names. A path in its value names it too.

    Of a mapping or a list, the place of the first part that the text names likewise.
    """
    names = names_in(text)
    starts = {name: number for number, name in reversed([*enumerate(names)])}
    values = options.given
    for name in _PATHS:
        if name in values and any(_holds(text, path) for path in _paths(values[name])):
            starts.setdefault(name, len(names))
    for name in sorted(starts, key=starts.__getitem__):
        if place := options.place_of(name):
            return _place_of_part(name, values.get(name), text, options) or place
    return None


def _place_of_part(at: str, value: object, text: str, options: TrainOptions) -> Place | None:
    if isinstance(value, dict):
        words = {f"{at}.{name}": [name] for name in value}
    else:  # of equal paths, the one with the most words in the text
        items = enumerate(value) if isinstance(value, list) else ()
        words = {
            f"{at}.{n}": [*map(str, [*each, *each.values()])] for n, each in items if isinstance(each, dict)
        }
    held = {part: sum(_holds(text, word) for word in every) for part, every in words.items()}
    best = max(held, key=held.__getitem__, default="")
    return options.place_of(best) if held.get(best) else None


def _paths(value: object) -> list[str]:
    """The paths in the value of an option."""
    if isinstance(value, list):
        return [path for each in value for path in _paths(each)]
    return [value["path"] if isinstance(value, dict) else str(value)]


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w./-]){re.escape(word)}(?![\w-])", text) is not None


def _mistakes(found: list[tuple[Place | None, str]], options: TrainOptions) -> Mistakes:
    """All mistakes in the order of files and lines, then those of the command line."""

    def order(mistake: tuple[Place | None, str]) -> tuple[int, int]:
        place, _ = mistake
        return (options._files.index(place[0]), place[1]) if place else (len(options._files), 0)

    said = sorted(dict.fromkeys(found), key=order)
    return Mistakes(InputError(f"{at[0]}:{at[1]}: {text}" if at else text) for at, text in said)
