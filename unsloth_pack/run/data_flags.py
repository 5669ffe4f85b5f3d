"""The flags of the data, for the subcommands that read some and do not train."""

from collections.abc import Mapping

from unsloth_pack.checkpoints.names import check_model_there
from unsloth_pack.config import Parser, TrainOptions, changed
from unsloth_pack.config.options import DataOptions, ImageOptions
from unsloth_pack.errors import errors_of, raise_together
from unsloth_pack.run.contradictions import contradictions
from unsloth_pack.run.resolve import training_sets

_OF_IMAGES = ("image_folder", "max_pixels", "min_pixels", "skip_broken_images", "shrink_images")
_NAMES = ("dataset", "mixture", "columns", "split", "sample_limit")


def add_data_flags(parser: Parser, dataset_help: str = "") -> None:
    """Give the parser `--dataset` and what goes with it, as `train` has it."""
    for name in _NAMES:
        parser.add_option(name, dataset_help if name == "dataset" else "")


def add_image_flags(parser: Parser, *, may_shrink: bool = True) -> None:
    """Give the parser the flags by which `train` prepares images."""
    for name in _OF_IMAGES if may_shrink else _OF_IMAGES[:-1]:
        parser.add_option(name)


def data_options(given: Mapping[str, object]) -> DataOptions:
    """The options of the data among the flags."""
    return _options(given, (*_NAMES, "num_proc")).data


def image_options(given: Mapping[str, object]) -> ImageOptions:
    """The options of images among the flags."""
    return _options(given, _OF_IMAGES).images


def _options(given: Mapping[str, object], names: tuple[str, ...]) -> TrainOptions:
    options = changed(TrainOptions(), {name: given[name] for name in names if name in given})
    raise_together(contradictions(options))
    return options


def check_sources(given: Mapping[str, object]) -> None:
    """Refuse a model and data that are not there, before torch is imported, which takes seconds."""
    model = errors_of(check_model_there, given.get("model_name", "demo"))
    sets = training_sets(data_options(given)) if "dataset" in given else []
    raise_together(model, *(errors_of(each.check_there) for each in sets))
