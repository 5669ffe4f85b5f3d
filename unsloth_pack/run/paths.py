"""The local paths that options name: what can be told of them without what reads them."""

from collections.abc import Iterator
from functools import partial

from unsloth_pack.checkpoints.places import check_model_there, is_adapter
from unsloth_pack.checkpoints.token_file import read_new_tokens
from unsloth_pack.config import TrainOptions
from unsloth_pack.errors import Check, InputError, about, at_once
from unsloth_pack.run.resolve import evaluation_sets, training_sets


def check_paths(options: TrainOptions) -> None:
    """Refuse paths at which nothing lies, all at once. What may be a name on the hub is not looked up.

    An adapter that a run begins with may be missing here: an earlier run may have yet to make it.

    Raises:
        InputError: names the path.
    """
    checks: list[Check] = [
        partial(each.check_there, options.data.streaming) for each in training_sets(options.data)
    ]
    checks += [each.check_there for each in evaluation_sets(options.data)]
    checks += [partial(_check_model, options.model.model_name), partial(_check_tokens, options)]
    at_once([*checks, partial(_check_written, options)])


def _check_model(model_name: str) -> None:
    with about("model_name", "init_adapter"):
        check_model_there(model_name)
    if is_adapter(model_name):
        raise InputError(
            f"model_name {model_name!r} is an adapter, and a run makes its own; give --init_adapter "
            f"{model_name!r} to begin with it, or merge it first with `unsloth-pack merge`",
            about="model_name",
        )


def _check_written(options: TrainOptions) -> Iterator[InputError]:
    for name in ("output_dir", "save_path"):
        folder = getattr(options.output, name)
        if folder is not None and not folder.strip():
            yield InputError(f"{name} is {folder!r}; give a folder", about=name)
        elif folder is not None and "${" in folder:
            yield InputError(
                f"{name} is {folder!r}, where nothing fills in a variable; write the folder out", about=name
            )


def _check_tokens(options: TrainOptions) -> None:
    if options.adapter.add_tokens is not None:
        read_new_tokens(options.adapter.add_tokens)
