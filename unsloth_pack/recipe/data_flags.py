"""The flags of the data, for the subcommands that read some and do not train."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from unsloth_pack.checkpoints.places import check_model_there
from unsloth_pack.errors import Check, at_once
from unsloth_pack.recipe.data_options import DataOptions
from unsloth_pack.recipe.flags import Option, options_of
from unsloth_pack.recipe.image_checks import image_mistakes
from unsloth_pack.recipe.image_options import ImageOptions
from unsloth_pack.recipe.named_data import check_data, training_sets
from unsloth_pack.recipe.parser import Parser, once

_OF_IMAGES = ("image_folder", "max_pixels", "min_pixels", "skip_broken_images", "shrink_images")
_NAMES = ("dataset", "mixture", "columns", "split", "sample_limit")


def add_data_flags(parser: Parser, dataset_help: str | None = None) -> None:
    """Give the parser `--dataset` and what goes with it, as `train` has it.

    Args:
        dataset_help: of `--dataset`, where it is another one.
    """
    for name in _NAMES:
        option = options_of(DataOptions)[name]
        about = dataset_help if name == "dataset" and dataset_help else _help(option)
        several: dict[str, Any] = {"action": once(option.kind.several)} if option.kind.several else {}
        about = about.replace("%", "%%")
        parser.add_argument(f"--{name}", type=option.kind, metavar=option.unit, help=about, **several)


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
        option = options_of(ImageOptions)[name]
        if option.type is bool:
            parser.add_switch(f"--{name}", option.help)
        else:
            parser.add_argument(f"--{name}", type=option.kind, metavar=option.unit, help=_help(option))


def image_options(given: Mapping[str, Any]) -> ImageOptions:
    """The options of images among the flags that were given.

    Raises:
        InputError: they contradict each other.
    """
    options = ImageOptions(**{name: given[name] for name in _OF_IMAGES if name in given})
    at_once([lambda: image_mistakes(options)])
    return options


def _help(option: Option) -> str:
    return f"{option.help} (default: {option.shown_default})"
