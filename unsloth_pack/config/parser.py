"""Flags: argparse whose errors are `InputError`, all of them at once."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

from unsloth_pack.config.names import suggest
from unsloth_pack.config.options import OPTIONS, Option, TrainOptions
from unsloth_pack.config.values import Refused, read_as
from unsloth_pack.errors import InputError, Mistakes


class _Once(argparse.Action):
    """A flag that holds all its values, so that a second one would drop those of the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, f"given twice; give it once, its values {_together(self)}")
        setattr(namespace, self.dest, values)


def _together(flag: argparse.Action) -> str:
    return "as one JSON value" if flag.metavar in ("JSON", "PATTERN") else "with commas between them"


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
        """As argparse's, with a type of pydantic. Values of other types are told together."""
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
        takes: dict[str, Any] = {"nargs": "?", "const": read_option(each, each.bare)} if each.bare else {}
        takes |= {"action": _Once} if each.takes_several else {}
        about = help or f"{each.help} (default: {each.shown_default})"
        kind = self._noting(flags, lambda text: read_option(each, text))
        add = group.add_argument if group else super().add_argument
        add(*flags, dest=name, type=kind, metavar=each.unit, help=about.replace("%", "%%"), **takes)

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
        """The flags that are there, by name; None where one restores a default.

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
            remedy = self._several(arguments, word) or self.remedy(flag)
            said.append(f"unknown argument {flag!r}; {remedy}")
        if said:
            errors = [*map(InputError, dict.fromkeys(said))]
            raise errors[0] if len(errors) == 1 else Mistakes(errors)
        return {name: value for name, value in vars(flags).items() if name != "debug"}

    def _several(self, arguments: Sequence[str], word: str) -> str:
        """How to write several values of a flag, if the word stands behind those that it takes."""
        before = [each for each in arguments[: arguments.index(word)] if each.startswith("--")]
        flag = self._option_string_actions.get(before[-1].partition("=")[0]) if before else None
        is_value = isinstance(flag, _Once) and not word.startswith("-")
        return f"give --{flag.dest} its values {_together(flag)}" if flag and is_value else ""

    def remedy(self, flag: str) -> str:
        """What to write in place of a flag that is unknown."""
        known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
        if flag.endswith((".yaml", ".yml")) and "config" in known:
            return f"give --config {flag}"
        meant = suggest(flag, known, lambda name: f"--{name}")
        return meant[0] if meant else f"see `{self.prog} --help`"


def read_option(option: Option, value: Any) -> Any:
    """A value as an option reads it; None, or null as text, restores the default.

    Raises:
        Refused: the option does not take it.
    """
    if value is None or value == "null":
        return None
    try:
        read = TrainOptions.model_validate({option.section: {option.name: value}})
    except ValidationError as error:
        raise Refused(error, 2) from None
    return getattr(getattr(read, option.section), option.name)
