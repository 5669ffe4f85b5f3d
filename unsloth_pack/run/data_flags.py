"""The flags of the data, for the subcommands that read some and do not train."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from unsloth_pack.checkpoints.places import check_model_there
from unsloth_pack.config import Parser
from unsloth_pack.config.options import DataOptions, ImageOptions
from unsloth_pack.errors import Check, at_once
from unsloth_pack.run.resolve import check_data, training_sets
from unsloth_pack.run.validate import image_mistakes

_OF_IMAGES = ("image_folder", "max_pixels", "min_pixels", "skip_broken_images", "shrink_images")
_NAMES = ("dataset", "mixture", "columns", "split", "sample_limit")


def add_data_flags(parser: Parser, dataset_help: str = "") -> None:
    """Give the parser `--dataset` and what goes with it, as `train` has it.

    Args:
        dataset_help: of `--dataset`, where it is another one.
    """
    for name in _NAMES:
        parser.add_option(name, dataset_help if name == "dataset" else "")


def data_options(given: Mapping[str, Any]) -> DataOptions:
    """The options of the data among the flags that were given.

    Raises:
        InputError: they contradict each other.
    """
    options = DataOptions(**{name: given[name] for name in (*_NAMES, "num_proc") if name in given})
    at_once([partial(check_data, options)])
    return options


def check_sources(given: Mapping[str, Any]) -> None:
    """Refuse a model and data that are not there, before torch is imported, which takes seconds.

    Raises:
        InputError: names them.
    """
    checks: list[Check] = [partial(check_model_there, given.get("model_name", "demo"))]
    if "dataset" in given:
        checks += [each.check for each in training_sets(data_options(given))]
    at_once(checks)


def add_image_flags(parser: Parser, *, may_shrink: bool = True) -> None:
    """Give the parser the flags by which `train` prepares images.

    Args:
        may_shrink: whether documents may be too long, so that images are made smaller.
    """
    for name in _OF_IMAGES if may_shrink else _OF_IMAGES[:-1]:
        parser.add_option(name)


def image_options(given: Mapping[str, Any]) -> ImageOptions:
    """The options of images among the flags that were given.

    Raises:
        InputError: they contradict each other.
    """
    options = ImageOptions(**{name: given[name] for name in _OF_IMAGES if name in given})
    at_once([lambda: image_mistakes(options)])
    return options
