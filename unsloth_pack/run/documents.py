"""From the rows of a data set to tokenised documents, in the same way for every subcommand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from pyarrow import Table
from transformers import PreTrainedTokenizerBase

from unsloth_pack.checkpoints import loading
from unsloth_pack.checkpoints.new_tokens import add_to_tokenizer
from unsloth_pack.checkpoints.token_file import read_new_tokens
from unsloth_pack.config import TrainOptions
from unsloth_pack.config.options import DataOptions
from unsloth_pack.data import check_token_ids
from unsloth_pack.data.columns import check_shared, check_used
from unsloth_pack.data.mixture import MixedRows, Mixture, Source, mix
from unsloth_pack.data.rows import telling_names
from unsloth_pack.data.sources import ChosenRows, DataSet
from unsloth_pack.data.streaming import DocumentStream, Place, RowSource, StreamedImages, first_columns
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.data.tokenize import Documents, documents_of
from unsloth_pack.errors import InputError, about
from unsloth_pack.images.prepared import holds_images
from unsloth_pack.run.images import ImagePreparation
from unsloth_pack.run.resolve import first_rows, training_sets
from unsloth_pack.training.trl_setup import training_template


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of an adapter: its own, or that of its base model.

    Raises:
        InputError: it cannot be found or loaded.
    """
    return loading.load_tokenizer(loading.tokenizer_folder(model_name))


@dataclass(frozen=True)
class RowsOfSet:
    """A data set, its rows, and the names that their columns had when they were read."""

    data_set: DataSet
    rows: Dataset
    names: tuple[str, ...]


def load_all(
    data_sets: Sequence[DataSet], split: str = "train", num_proc: int | None = None, most: int | None = None
) -> list[RowsOfSet]:
    """The rows of some data sets.

    Args:
        split: that is read where none is named.
        num_proc: processes that read large files; None for as many as there are cores.
        most: rows of each that are taken, its first ones; None for all.

    Raises:
        InputError: one of them cannot be read; names it.
    """
    found = []
    for data_set in data_sets:
        rows = data_set.read(split, num_proc)
        chosen = first_rows(data_set, most).for_rows_with(rows.column_names)
        found.append(RowsOfSet(chosen, chosen.chosen(rows), tuple(rows.column_names)))
    return found


def load_training_data(data: DataOptions, most: int | None = None) -> list[RowsOfSet]:
    """The rows of what is trained on, see `load_all`.

    Args:
        most: rows of each that are taken, beside what the options say.

    Raises:
        InputError: one of them cannot be read, or none has a column that the options map.
    """
    limits = [limit for limit in (most, data.sample_limit) if limit is not None]
    loaded = load_all(training_sets(data), num_proc=data.num_proc, most=min(limits, default=None))
    _check_shared_columns(data, [(each.data_set, each.names) for each in loaded])
    return loaded


def _check_shared_columns(data: DataOptions, found: Sequence[tuple[DataSet, Sequence[str]]]) -> None:
    sharing = {data_set.name: names for data_set, names in found if data_set.shares_columns}
    if sharing:
        check_shared(data.columns or {}, sharing)


def mixed_documents(
    given: Sequence[RowsOfSet],
    tokenizer: Any,
    max_length: int,
    train_on_responses_only: bool | None = None,
    num_proc: int | None = None,
    *,
    how: str = "concatenate",
    seed: int = 0,
    eval_fraction: float | None = None,
    most: int | None = None,
    images: ImagePreparation | None = None,
) -> Mixture:
    """The documents of one or several data sets, each in its own format, see `prepare_documents`, `mix`.

    Args:
        images: how those are prepared that have images; None if there are none.

    Raises:
        InputError: a row cannot be trained on. The error names the data set, unless only it is trained on.
    """
    sources = []
    for each in given:
        name, columns, are_shared = each.data_set.name, each.data_set.columns, each.data_set.shares_columns
        try:
            with telling_names(columns, are_shared=are_shared):
                documents = prepare_documents(
                    each.rows, tokenizer, max_length, train_on_responses_only, num_proc, images
                )
            check_used(columns, documents.unused_columns, are_shared=are_shared)
        except InputError as error:
            error.about = (*error.about, each.data_set.option)
            if len(given) == 1 and each.data_set.option != "eval_dataset":
                raise
            raise InputError(f"{name}: {error}", about=error.about) from None
        sources.append(Source(name, each.data_set.weight, documents, each.data_set.option))
    return mix(sources, how, seed=seed, eval_fraction=eval_fraction, most=most)


def prepare_documents(
    rows: Dataset,
    tokenizer: Any,
    max_length: int,
    train_on_responses_only: bool | None = None,
    num_proc: int | None = None,
    images: ImagePreparation | None = None,
) -> Documents:
    """Rows of any known format as token ids and labels, see `documents_of`.

    Args:
        train_on_responses_only: whether only responses carry loss; None if nothing is trained on the rows.
        num_proc: processes that share out the rows; None for as many as there are cores.
        images: how images are prepared. The documents then have a column for them.
    """
    if images is not None and holds_images(rows):
        return images.documents(rows, max_length, bool(train_on_responses_only), num_proc)
    documents = documents_of(
        rows,
        tokenizer,
        max_length=max_length,
        train_on_responses_only=train_on_responses_only,
        chat_template=training_template(tokenizer) if train_on_responses_only else None,
        num_proc=num_proc,
    )
    return documents if images is None else images.beside(documents)


@dataclass(frozen=True)
class OpenedStream:
    """Data sets, and the stream that is made of their rows."""

    data_sets: tuple[DataSet, ...]
    source: RowSource


def open_training_data(data: DataOptions, seed: int) -> OpenedStream:
    """The rows of what is trained on as one stream, see `mix`.

    Raises:
        InputError: a data set cannot be read, or has a weight that a stream cannot keep, or none has a
            column that the options map.
    """
    data_sets, sources, found = [], [], []
    for data_set in training_sets(data):
        source = data_set.open()
        if data_set.shares_columns and data_set.columns:
            names = first_columns(source)
            found.append((data_set, names))
            data_set = data_set.for_rows_with(names)
        data_sets.append(data_set)
        sources.append(data_set.chosen_of(source))
    _check_shared_columns(data, found)
    weights, most = [data_set.weight for data_set in data_sets], data.sample_limit
    is_mixed = len(sources) > 1 or weights != [1]
    whole = MixedRows(sources, weights, data.mixture, seed) if is_mixed else sources[0]
    return OpenedStream(tuple(data_sets), whole if most is None else ChosenRows(whole, {}, most))


def first_of_stream(source: RowSource) -> list[Dataset]:
    """The first rows of each part of a stream that has some."""
    passes = (part.one_pass(Place()) for part in source.parts)
    blocks = (next((block for block in blocks if block.n_rows), None) for blocks in passes)
    return [block.read(range(block.n_rows)) for block in blocks if block is not None]


def stream_documents(
    source: RowSource,
    tokenizer: Any,
    vocab_size: int,
    max_length: int,
    train_on_responses_only: bool,
    images: StreamedImages | None = None,
    check_text: Callable[[Table, str], None] | None = None,
    have_images: Callable[[Dataset], bool] | None = None,
) -> DocumentStream:
    """The documents of a stream; its first rows are read now.

    Args:
        images, check_text, have_images: as `DocumentStream` takes them.

    Raises:
        InputError: they cannot be trained on.
    """
    return DocumentStream(
        source,
        tokenizer,
        vocab_size=vocab_size,
        max_length=max_length,
        responses_only=train_on_responses_only,
        chat_template=training_template(tokenizer) if train_on_responses_only else None,
        images=images,
        check_text=check_text,
        have_images=have_images,
    )


def check_ids(documents: Documents, vocab_size: int) -> None:
    """Refuse documents with token ids that have no embedding, see `check_token_ids`."""
    if documents.least_id < 0 or documents.last_id >= vocab_size:
        check_token_ids(documents.rows, vocab_size)


def to_documents(
    rows: Dataset, tokenizer: Any, max_length: int, train_on_responses_only: bool | None = None
) -> tuple[Dataset, TokenLedger]:
    """The rows and the ledger of `prepare_documents`."""
    documents = prepare_documents(rows, tokenizer, max_length, train_on_responses_only)
    return documents.rows, documents.ledger


# The tokenizer of a run, and the tokens that the run adds to it.


def tokenizer_of_run(options: TrainOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of the adapter that the run begins with, if it has one, else of the model.

    Raises:
        InputError: it cannot be loaded, or has neither a token to pad with nor one that ends a text.
    """
    model_name = options.adapter.init_adapter or options.model.model_name
    with about("init_adapter", "model_name"):
        tokenizer = load_tokenizer(model_name)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise InputError(
            f"the tokenizer of {model_name} has neither pad_token nor eos_token; name one of its tokens in "
            "tokenizer_config.json",
            about="model_name",
        )
    return tokenizer


def add_new_tokens(options: TrainOptions, tokenizer: Any) -> dict[int, list[int]]:
    """Add new tokens to the tokenizer; those that the adapter has which the run begins with are there.

    Returns:
        By the id of each new token, what it is made from; as `add_to_tokenizer`.

    Raises:
        InputError: the adapter that the run goes on with has other tokens.
    """
    adapter = options.adapter
    if adapter.add_tokens is None:
        return {}
    tokens = read_new_tokens(adapter.add_tokens)
    goes_on = adapter.init_adapter is not None and not adapter.merge_init_adapter
    if goes_on and tokens.keys() <= tokenizer.get_vocab().keys():
        return {}
    if goes_on:
        raise InputError(
            f"add_tokens is {adapter.add_tokens!r} and init_adapter {adapter.init_adapter!r} has other "
            "tokens; leave out --add_tokens, or give --merge_init_adapter to train a new adapter on top of "
            "it",
            about=("add_tokens", "init_adapter"),
        )
    return add_to_tokenizer(tokenizer, tokens)
