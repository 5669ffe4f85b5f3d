"""Flags: argparse whose errors are `InputError`, all of them at once."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

from unsloth_pack.config.names import suggest
from unsloth_pack.config.options import OPTIONS, SECTIONS, Option, TrainOptions
from unsloth_pack.config.values import Refused, read_as
from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.errors import InputError, Mistakes

_TOGETHER = "its values with commas between them, or as JSON"


class _Once(argparse.Action):
    """A flag that holds all its values, so that a second one would drop those of the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, f"given twice; give it once, {_TOGETHER}")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Flags with underscores, spelt out in full. A flag that is not there is not in the result.

    Args:
        options: argparse's own.
    """

    def __init__(self, **options: Any):
        super().__init__(
            allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False, **options
        )
        self._refused: list[str] = []
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's, with a type of pydantic."""
        if "type" in options:
            kind = options["type"]
            options["type"] = self._noting(names, lambda text: read_as(kind, text))
        return super().add_argument(*names, **options)

    def add_switch(self, name: str, help: str) -> None:
        """Add a flag that is true when bare, and false when it is not there."""
        takes: dict[str, Any] = {"nargs": "?", "const": True, "metavar": "true|false"}
        self.add_argument(name, type=bool, help=f"{help} (default: false)", **takes)

    def add_option(self, name: str, help: str = "", group: Any = None) -> None:
        """Add the flag of an option of `train`.

        Args:
            help: in place of the option's own.
            group: of the help, to add it to.
        """
        each = OPTIONS[name]
        flags = [f"--{name}" for name in each.names]
        takes: dict[str, Any] = {"nargs": "?", "const": _read(each, each.bare)} if each.bare else {}
        takes |= {"action": _Once} if each.takes_several else {}
        takes["help"] = (help or f"{each.help} (default: {each.shown_default})").replace("%", "%%")
        kind = self._noting(flags, lambda text: _read(each, text))
        add = group.add_argument if group else super().add_argument
        add(*flags, dest=name, type=kind, metavar=each.unit, **takes)

    def _noting(self, names: Sequence[str], read: Callable[[str], Any]) -> Callable[[str], Any]:
        """The type of a flag, of which a wrong value does not end the parsing."""

        def noting(text: str) -> Any:
            try:
                return read(text)
            except Refused as error:
                self._refused += [f"argument {'/'.join(names)}: {end}" for end in error.ends]
                return None

        return noting

    def error(self, message: str) -> NoReturn:
        raise InputError(self._with_remedy(message))

    def _with_remedy(self, message: str) -> str:
        return message if ";" in message else f"{message}; see `{self.prog} --help`"

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Read the flags that are there, by name; None where one restores a default.

        Raises:
            InputError: unknown flags, and values that their flags do not take.
        """
        self._refused.clear()
        try:
            flags, unknown = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:  # what follows is not read
            self._refused.append(str(error))
            flags, unknown = argparse.Namespace(), []
        said = [*map(self._with_remedy, self._refused)]
        for word in [*unknown[:1], *(word for word in unknown[1:] if word.startswith("--"))]:
            flag = word.partition("=")[0]  # without its value, which may be secret
            said.append(f"unknown argument {flag!r}; {self._several(arguments, word) or self.remedy(flag)}")
        errors = [*map(InputError, dict.fromkeys(said))]
        if errors:
            raise errors[0] if len(errors) == 1 else Mistakes(errors)
        return {name: value for name, value in vars(flags).items() if name != "debug"}

    def _several(self, arguments: Sequence[str], word: str) -> str:
        """How to write several values of a flag, if the word stands behind those that it takes."""
        before = [each for each in arguments[: arguments.index(word)] if each.startswith("--")]
        flag = self._option_string_actions.get(before[-1].partition("=")[0]) if before else None
        is_value = isinstance(flag, _Once) and not word.startswith("-")
        return f"give --{flag.dest} {_TOGETHER}" if flag and is_value else ""

    def remedy(self, flag: str) -> str:
        """What to write in place of a flag that is unknown."""
        known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
        if flag.endswith((".yaml", ".yml")) and "config" in known:
            return f"give --config {flag}"
        meant = suggest(flag, known, lambda name: f"--{name}")
        return meant[0] if meant else f"see `{self.prog} --help`"


def _read(option: Option, text: str) -> Any:
    """A value as an option reads it; null restores the default."""
    try:
        read = TrainOptions.model_validate({option.section: {option.name: text}} if text != "null" else {})
    except ValidationError as error:
        raise Refused(error, 2) from None
    return getattr(getattr(read, option.section), option.name) if text != "null" else None


def train_parser(**options: Any) -> Parser:
    """Make the parser of the flags of all options.

    Args:
        options: argparse's own, in place of those of `train`.
    """
    defaults = ", ".join(f"{name} {value}" for name, value in DEMO_DEFAULTS.items())
    about = (
        "Fine-tune a language model with a LoRA adapter. Without flags, the bundled model trains on the "
        f"bundled data, with defaults of its own: {defaults}. On your own data: unsloth-pack --model_name "
        "MODEL --dataset DATA --sample_packing. A [true|false] flag that stands alone is true."
    )
    usage = {"prog": "unsloth-pack", "usage": "unsloth-pack [train] [flags]", "description": about}
    parser = Parser(**{**usage, **options})
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section, kind.__doc__)
        for name in kind.model_fields:
            parser.add_option(name, group=group)
    return parser
