"""argparse whose errors are `InputError`, and the types that check a flag's value as it is read."""

import argparse
import difflib
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.other_trainers import FLAGS

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_HELP = "of the weights; default: bfloat16 where the GPU has it, else float16 on it, float32 on a CPU"
# How alike (difflib's ratio, 0 to 1, dashes included) a flag has to be to be suggested. One wrong letter in a
# name of four gives 0.83; other trainers' flags for other things reach 0.82, such as eval_accumulation_steps.
_CLOSE = 0.83
_TELLING = 4  # letters that a shortened flag needs to be recognised
SAVE_METHODS = ("merged_16bit", "lora")


class Parser(argparse.ArgumentParser):
    """Flags with underscores, spelt out in full. What was not given is not in the result.

    Args:
        remedies: what to do instead of giving flags that there are not, by name.
        options: of argparse.
    """

    def __init__(self, remedies: Mapping[str, str] | None = None, **options: Any):
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **options)
        self._remedies = remedies or {}
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_choice(self, name: str, choices: Sequence[str], help: str) -> None:
        """A flag that takes one word out of a few, which its help lists."""
        self.add_argument(name, type=one_of(*choices), metavar="|".join(choices), help=help)

    def add_switch(self, name: str, help: str, words: Sequence[str] = ()) -> None:
        """A flag that is true when bare, false by default, and may take a few words more."""
        metavar = "|".join(("true", "false", *words))
        help = f"{help} (default: false)"
        self.add_argument(name, type=switch_or(*words), nargs="?", const=True, metavar=metavar, help=help)

    def error(self, message: str) -> NoReturn:
        remedy = "" if ";" in message else f"; see `{self.prog} --help`"
        raise InputError(message + remedy)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The flags that were given, by name.

        Raises:
            InputError: an unknown flag, or a value that its flag does not take or that is no text.
        """
        for argument in arguments:
            try:
                argument.encode()
            except UnicodeEncodeError:  # Python's way to hold the bytes of such a name
                raise InputError(f"argument {argument!r} is not UTF-8; rename what it names") from None
            if argument.startswith("--") and argument.endswith("=--"):  # argparse makes a list of it
                raise InputError(f"argument {argument[:-3]}: got '--'; see `{self.prog} --help`")
        given, unknown = self.parse_known_args(arguments)
        if unknown:
            flag = unknown[0].partition("=")[0]
            # without its value: some are secret
            raise InputError(f"unknown argument {flag!r}; {self._remedy(flag)}")
        return vars(given)

    def _remedy(self, flag: str) -> str:
        """What to write in place of a flag that is unknown."""
        flags = self._option_string_actions
        name = flag.lstrip("-").replace("-", "_")
        if (ours := f"--{FLAGS.get(name)}") in flags:
            return f"did you mean {ours}?"
        if name in self._remedies:
            return self._remedies[name]
        close = _shortened(name, flags) or difflib.get_close_matches(f"--{name}", flags, 1, _CLOSE)
        return f"did you mean {close[0]}?" if close else f"see `{self.prog} --help`"


def _shortened(name: str, flags: Iterable[str]) -> list[str]:
    """The flag that begins with `name`; none where the name is too short, or several flags begin with it."""
    longer = [flag for flag in flags if flag.startswith(f"--{name}")]
    return longer if len(longer) == 1 and len(name) >= _TELLING else []


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of a whole number that is at least `least` and at most `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise _refused(text, f"a whole number of at least {least}")
        if value > most:
            raise _refused(text, f"a whole number of at most {most}")
        return value

    return read


def real(least: float = -math.inf, *, above: float = -math.inf, below: float = 1e9) -> Callable[[str], float]:
    """The type of a number with `least <= number`, `above < number` and `number < below`."""
    bounds = [f"of at least {least:g}"] if least > -math.inf else []
    bounds += [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"below {below:g}"]

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= least and above < value < below):
            raise _refused(text, f"a number {' and '.join(bounds)}")
        return value

    return read


def one_of(*choices: str) -> Callable[[str], str]:
    """The type of a word out of a few."""

    def read(text: str) -> str:
        if text not in choices:
            raise _refused(text, f"one of {', '.join(choices)}")
        return text

    return read


def boolean(text: str) -> bool:
    """The type of a switch: bare, or with true or false."""
    if text.lower() not in ("true", "false"):
        raise _refused(text, "true or false, or the flag alone")
    return text.lower() == "true"


def switch_or(*words: str) -> Callable[[str], bool | str]:
    """The type of a switch that also takes a few words."""

    def read(text: str) -> bool | str:
        if text in words:
            return text
        if words and text.lower() not in ("true", "false"):
            raise _refused(text, f"one of true, false, {', '.join(words)}")
        return boolean(text)

    return read


def json_object(text: str) -> dict[str, Any]:
    """The type of a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _refused(text, """a JSON object, such as '{"loftq_bits": 4}'""")
    return value


def _refused(text: str, wanted: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"got {reprlib.repr(text)}; give {wanted}")
