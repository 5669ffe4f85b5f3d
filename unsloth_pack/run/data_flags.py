"""The flags of the data, for the subcommands that read some and do not train."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unsloth_pack.checkpoints.names import check_model_there
from unsloth_pack.config import OPTIONS, Parser, TrainOptions, changed
from unsloth_pack.errors import InputError, errors_of, raise_together
from unsloth_pack.run.contradictions import contradictions
from unsloth_pack.run.resolve import training_sets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from unsloth_pack.data.mixture import Mixture
    from unsloth_pack.run.images import ImagePreparation

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


def options_of(given: Mapping[str, object]) -> TrainOptions:
    """The options of data and images among the flags; all others have their defaults."""
    read = ("seed", "objective")
    names = (n for n in given if n in read or (n in OPTIONS and OPTIONS[n].section in ("data", "images")))
    options = changed(TrainOptions(), {name: given[name] for name in names})
    raise_together(contradictions(options))
    return options


def check_sources(given: Mapping[str, object]) -> None:
    """Refuse a model and data that are not there, before torch is imported, which takes seconds."""
    model = errors_of(check_model_there, given.get("model_name", "demo"))
    sets = training_sets(options_of(given).data) if "dataset" in given else []
    raise_together(model, *(errors_of(each.check_there) for each in sets))


def read_documents(
    given: Mapping[str, object],
    model_name: str,
    max_length: int,
    train_on_responses_only: bool | None = None,
    *,
    most: int | None = None,
    why_no_images: str = "",
    keep_bytes: bool = True,
) -> "tuple[Mixture, ImagePreparation | None, PreTrainedTokenizerBase]":
    """Tokenise the data that the flags name; return it, how images are prepared, and the tokenizer.

    Args:
        most: rows of each data set at most.
        why_no_images: why the command refuses images, and what to do; empty where it reads them.

    Raises:
        InputError: a data set cannot be read or trained on, or an option of images has no effect.
    """
    from unsloth_pack.images.prepared import holds_images
    from unsloth_pack.run.documents import DocumentPreparation, load_tokenizer, load_training_data
    from unsloth_pack.run.images import image_preparation, takes_images

    options, images = options_of(given), None
    data = options.data
    sets, tokenizer = load_training_data(data, most), load_tokenizer(model_name)
    rows = [each.rows for each in sets]
    if not why_no_images:
        images = image_preparation(model_name, tokenizer, options.images, rows, keep_bytes=keep_bytes)
    elif takes_images(model_name) and any(map(holds_images, rows)):
        raise InputError(f"the data has images, {why_no_images}")
    prepare = DocumentPreparation(
        tokenizer,
        max_length,
        train_on_responses_only,
        data.num_proc,
        images,
        objective=options.training.objective,
    )
    mixture = prepare.mixture(sets, how=data.mixture, seed=options.training.seed, most=data.sample_limit)
    return mixture, images, tokenizer
