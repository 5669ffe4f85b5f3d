"""Flags: argparse whose errors are `InputError`."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from unsloth_pack.config.names import suggest
from unsloth_pack.config.options import OPTIONS, SECTIONS, validated
from unsloth_pack.config.values import read_as
from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.errors import InputError, raise_together


class Parser(argparse.ArgumentParser):
    """Flags with underscores, spelt out in full. A flag that is not there is not in the result.

    Args:
        options: argparse's own.
    """

    def __init__(self, **options: Any):
        self.actions: list[argparse.Action] = []
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **options)
        self._options: set[str] = set()  # of `train`, among the flags
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's, with a type of pydantic."""
        if kind := options.get("type"):

            def read(text: str) -> object:
                try:
                    return read_as(kind, text, names[0].removeprefix("--"))
                except InputError as error:
                    raise argparse.ArgumentTypeError(str(error)) from None

            options["type"] = read
        self.actions.append(super().add_argument(*names, **options))
        return self.actions[-1]

    def add_switch(self, name: str, help: str) -> None:
        """Add a flag that is true when bare, and false when it is not there."""
        takes: dict[str, Any] = {"nargs": "?", "const": True, "metavar": "true|false"}
        self.add_argument(name, type=bool, help=f"{help} (default: false)", **takes)

    def add_option(self, name: str, help: str = "", group: Any = None) -> None:
        """Add the flag of an option of `train`, to a group of the help, with help of its own or another."""
        each = OPTIONS[name]
        self._options.add(name)
        takes: dict[str, Any] = {"dest": name, "action": "append", "metavar": each.unit}
        takes |= {"nargs": "?", "const": each.bare} if each.bare else {}
        help = (help or f"{each.help} (default: {each.shown_default})").replace("%", "%%")
        action = (group or self).add_argument(*(f"--{name}" for name in each.names), help=help, **takes)
        self.actions += [action] if group else []
        in_section = [f"--{each.section}.{name}" for name in each.names]
        self.add_argument(*in_section, help=argparse.SUPPRESS, **takes)

    def error(self, message: str) -> NoReturn:
        raise InputError(message if ";" in message else f"{message}; see `{self.prog} --help`")

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Read the flags that are there, by name: those of options as text, and None for `null`."""
        flags, unknown = self.parse_known_args(arguments)
        values = {name: value for name, value in vars(flags).items() if name != "debug"}
        mistakes = []
        for name in filter(self._options.__contains__, values):
            if len(values[name]) > 1 and (OPTIONS[name].takes_several or name == "config"):
                mistakes.append(InputError(f"--{name} is given twice; give it once, with all of its values"))
            values[name] = values[name][-1]
        for word in [*unknown[:1], *(word for word in unknown[1:] if word.startswith("--"))]:
            flag = word.partition("=")[0]  # without its value, which may be secret
            mistakes.append(InputError(f"unknown argument {flag!r}; {self.remedy(flag)}"))
        raise_together(mistakes)
        return {name: None if value == "null" else value for name, value in values.items()}

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Read the flags that are there, by name, without those that restore a default."""
        values = self.read(arguments)
        options, errors = validated({name: value for name, value in values.items() if name in self._options})
        raise_together(InputError(text) for _, text in errors)
        return {name: value for name, value in values.items() if name not in self._options} | options.given

    def remedy(self, flag: str) -> str:
        """What to write in place of a flag that is unknown."""
        known = [name.removeprefix("--") for name in self._option_string_actions if "." not in name]
        if not flag.startswith("-"):
            return "begin a flag with --, and put commas between its values"
        return suggest(flag, known, lambda name: f"--{name}") or f"see `{self.prog} --help`"


def train_parser(**options: object) -> Parser:
    """Make the parser of the flags of all options; `options` are argparse's own."""
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
