"""From the command line of `train` to the options of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.recipe.config_file import read_config_file
from unsloth_pack.recipe.flags import add_flags, read_values
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.other_trainers import REMEDIES
from unsloth_pack.recipe.parser import Parser
from unsloth_pack.recipe.resolve import resolve


def read_options(arguments: Sequence[str], epilog: str = "") -> TrainOptions:
    """The options of a run, with all defaults filled in but those that depend on the device.

    A value comes from the command line, else from the config file, else from the run that is resumed or from
    the demo, else it is the default.

    Args:
        arguments: of the command line.
        epilog: ends the help.

    Raises:
        InputError: an unknown option, a value out of range, a config file that cannot be read, a resumed run
            that is not there or was started otherwise, or packed rows that an option contradicts.
    """
    return resolve(given_options(train_parser(epilog), arguments))


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
    flags = parser.parse(arguments)
    if "config" not in flags:
        return flags
    path = Path(flags["config"])
    source, values = f"config is {str(path)!r}", read_config_file(path)
    return read_values(TrainOptions, values, source, lambda name: parser.remedy(f"--{name}")) | flags
