"""Flags: argparse whose errors are `InputError`, all of them at once."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from unsloth_pack.config.names import suggest
from unsloth_pack.config.options import OPTIONS, SECTIONS, validated
from unsloth_pack.config.values import read_as
from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.errors import InputError, raise_together

_TOGETHER = "its values with commas between them, or as JSON"


class Parser(argparse.ArgumentParser):
    """Flags with underscores, spelt out in full. A flag that is not there is not in the result.

    Args:
        options: argparse's own.
    """

    def __init__(self, **options: Any):
        self._kinds: dict[str, Any] = {}
        super().__init__(
            allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False, **options
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's, with a type of pydantic."""
        kind = options.pop("type", None)
        action = super().add_argument(*names, **options)
        self._kinds |= {action.dest: kind} if kind else {}
        return action

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
        takes: dict[str, Any] = {"nargs": "?", "const": each.bare} if each.bare else {}
        takes |= {"action": "append"} if each.takes_several else {}
        help = (help or f"{each.help} (default: {each.shown_default})").replace("%", "%%")
        flags = [f"--{name}" for name in each.names]
        add = group.add_argument if group else super().add_argument
        add(*flags, dest=name, metavar=each.unit, help=help, **takes)

    def error(self, message: str) -> NoReturn:
        raise InputError(message if ";" in message else f"{message}; see `{self.prog} --help`")

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Read the flags that are there, by name; None where one restores a default.

        Raises:
            InputError: unknown flags, and values that their flags do not take.
        """
        try:
            flags, unknown = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            self.error(str(error))
        values, mistakes = {name: value for name, value in vars(flags).items() if name != "debug"}, []
        own: dict[str, Any] = {}
        for name, value in values.items():
            if name in self._kinds:
                try:
                    values[name] = read_as(self._kinds[name], value, name)
                except InputError as error:
                    mistakes.append(error)
            elif name in OPTIONS:
                own[name] = value[0] if isinstance(value, list) else value
                if isinstance(value, list) and len(value) > 1:
                    mistakes.append(InputError(f"--{name} is given twice; give it once, {_TOGETHER}"))
        options, errors = validated({name: value for name, value in own.items() if value != "null"})
        values |= {name: options.given.get(name) for name in own}
        mistakes += [InputError(text) for _, text in errors]
        for word in [*unknown[:1], *(word for word in unknown[1:] if word.startswith("--"))]:
            flag = word.partition("=")[0]  # without its value, which may be secret
            mistakes.append(InputError(f"unknown argument {flag!r}; {self.remedy(flag)}"))
        raise_together(mistakes)
        return values

    def remedy(self, flag: str) -> str:
        """What to write in place of a flag that is unknown."""
        known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
        if flag.endswith((".yaml", ".yml")) and "config" in known:
            return f"give --config {flag}"
        if not flag.startswith("-"):
            return f"give a flag {_TOGETHER}"
        return suggest(flag, known, lambda name: f"--{name}") or f"see `{self.prog} --help`"


def train_parser(**options: object) -> Parser:
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
