"""The options of a command line, as `train` resolves them."""

from unsloth_pack.config import load, telling_places
from unsloth_pack.run.resolve import resolve


def read_options(arguments):
    asked = load(arguments)
    with telling_places(asked):
        return resolve(asked)
