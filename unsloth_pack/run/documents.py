"""From the rows of a data set to tokenised documents, in the same way for every subcommand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unsloth_pack.checkpoints import loading
from unsloth_pack.checkpoints.new_tokens import add_to_tokenizer, read_new_tokens
from unsloth_pack.config.options import AdapterOptions, DataOptions
from unsloth_pack.data.columns import check_shared, check_used
from unsloth_pack.data.labels import Labels
from unsloth_pack.data.mixture import MixedRows, Mixture, Source, mix, short_names
from unsloth_pack.data.preferences import preferences_of
from unsloth_pack.data.rows import CHANNEL, PREFERENCES
from unsloth_pack.data.sources import ChosenRows, DataSet
from unsloth_pack.data.streaming import Place, RowSource
from unsloth_pack.data.tokenize import Documents, documents_of
from unsloth_pack.errors import InputError
from unsloth_pack.images.prepared import holds_images
from unsloth_pack.run.images import ImagePreparation
from unsloth_pack.run.resolve import training_sets
from unsloth_pack.training.trl_setup import training_template


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of an adapter: its own, or that of its base model."""
    return loading.load_tokenizer(loading.tokenizer_folder(model_name))


class RunTokenizer(NamedTuple):
    """The tokenizer of a run. `new_tokens`: by the id of each new token, the ids of its description."""

    tokenizer: PreTrainedTokenizerBase
    new_tokens: Mapping[int, list[int]]


def load_run_tokenizer(model_name: str, adapter: AdapterOptions) -> RunTokenizer:
    """Load the tokenizer of the adapter that the run begins with, or of the model, and add new tokens."""
    tokenizer = load_tokenizer(adapter.init_adapter or model_name)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise InputError(
            f"the tokenizer of {adapter.init_adapter or model_name} has neither pad_token nor eos_token; "
            "name one of its tokens in tokenizer_config.json"
        )
    tokens = read_new_tokens(adapter.add_tokens) if adapter.add_tokens is not None else {}
    if adapter.init_adapter is None or adapter.merge_init_adapter:
        return RunTokenizer(tokenizer, add_to_tokenizer(tokenizer, tokens))
    if not tokens.keys() <= tokenizer.get_vocab().keys():
        raise InputError(
            f"add_tokens is {adapter.add_tokens!r} and init_adapter {adapter.init_adapter!r} has other "
            "tokens; leave out --add_tokens, or give --merge_init_adapter to train a new adapter on top of it"
        )
    return RunTokenizer(tokenizer, {})


@dataclass(frozen=True)
class RowsOfSet:
    """A data set, its rows, and the names that their columns had when they were read."""

    data_set: DataSet
    rows: Dataset
    names: tuple[str, ...]


def load_all(
    data_sets: Sequence[DataSet], num_proc: int | None, *most: int | None, split: str = "train"
) -> list[RowsOfSet]:
    """Load the first rows of data sets, at most each `most`; `split` is of those that name none."""
    loaded = []
    for data_set in data_sets:
        rows = data_set.read(split, num_proc)
        limits = [limit for limit in (data_set.limit, *most) if limit is not None]
        limited = replace(data_set, limit=min(limits, default=None))
        chosen = limited.for_rows_with(rows.column_names)
        loaded.append(RowsOfSet(chosen, chosen.chosen(rows), tuple(rows.column_names)))
    return loaded


def load_training_data(data: DataOptions, most: int | None = None) -> list[RowsOfSet]:
    """Load the rows that a run trains on, see `load_all`; at most `most` of each data set."""
    loaded = load_all(training_sets(data), data.num_proc, data.sample_limit, most)
    sharing = {each.data_set.name: each.names for each in loaded if each.data_set.shares_columns}
    check_shared(data.columns or {}, sharing)
    return loaded


@dataclass(frozen=True)
class DocumentPreparation:
    """How rows of any known format become documents.

    Args:
        max_length: of a document, in tokens.
        train_on_responses_only: only responses carry loss; None if nothing is trained on the rows.
        num_proc: processes that share the rows; None for as many as there are cores.
        images: how images are prepared, for which documents then have a column; None if there are none.
        labels: of the documents, where those are learned in place of the text.
        objective: what is trained for; for those of `PREFERENCES` documents have a column of parts.
        has_channels: documents of several data sets have the column `CHANNEL`.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    train_on_responses_only: bool | None = None
    num_proc: int | None = None
    images: ImagePreparation | None = None
    labels: Labels | None = None
    objective: str = "sft"
    has_channels: bool = False

    def channels(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return what logs call data sets, if their documents have the column `CHANNEL`; else nothing."""
        return short_names(names) if self.has_channels and len(names) > 1 else ()

    def mixture(self, loaded: Sequence[RowsOfSet], **how: Any) -> Mixture:
        """Tokenise one or several data sets, each in its own format; `how` they are mixed is of `mix`.

        Raises:
            InputError: a row cannot be trained on; names the data set.
        """
        sources, channels = [], self.channels([each.data_set.name for each in loaded])
        for number, each in enumerate(loaded):
            name = each.data_set.name
            try:
                documents = self.documents(each.rows)
                check_used(each.data_set.columns, documents.unused_columns)
            except InputError as error:
                raise InputError(f"{name}: {error}") from None
            if channels:
                numbers = [[number]] * len(documents.rows)
                documents = replace(documents, rows=documents.rows.add_column(CHANNEL, numbers))
            sources.append(Source(name, each.data_set.weight, documents))
        return mix(sources, **how)

    def documents(self, rows: Dataset) -> Documents:
        """Tokenise the rows of a data set."""
        tokenizer, only_responses, images = self.tokenizer, self.train_on_responses_only, self.images
        common: dict[str, Any] = {"max_length": self.max_length, "num_proc": self.num_proc}
        if self.objective in PREFERENCES:
            if images is not None:
                raise InputError(
                    f"objective is {self.objective!r} and rows have images; give rows of text alone"
                )
            return preferences_of(rows, tokenizer, objective=self.objective, **common)
        if self.labels is not None:
            classes, texts = self.labels.numbers(rows), rows.remove_columns(self.labels.column)
            return documents_of(texts, tokenizer, classes=classes, **common)
        if images is not None and holds_images(rows):
            return images.documents(rows, self.max_length, bool(only_responses), self.num_proc)
        template = training_template(tokenizer) if only_responses else None
        documents = documents_of(
            rows, tokenizer, train_on_responses_only=only_responses, chat_template=template, **common
        )
        return documents if images is None else images.beside(documents)


def open_training_data(data: DataOptions, seed: int) -> tuple[list[DataSet], RowSource]:
    """Open the rows that a run trains on as one stream, see `mix`; return the data sets too."""
    data_sets, sources, sharing = [], [], {}
    for data_set in training_sets(data):
        source = data_set.open()
        if data_set.columns:
            names = [name for rows in first_of_stream(source) for name in rows.column_names]
            if data_set.shares_columns:
                sharing[data_set.name] = names
            data_set = data_set.for_rows_with(names)
        data_sets.append(data_set)
        sources.append(ChosenRows(source, data_set.columns, data_set.limit))
    check_shared(data.columns or {}, sharing)
    weights, most = [data_set.weight for data_set in data_sets], data.sample_limit
    is_mixed = len(sources) > 1 or weights != [1]
    whole = MixedRows(sources, weights, data.mixture, seed) if is_mixed else sources[0]
    return data_sets, whole if most is None else ChosenRows(whole, {}, most)


def first_of_stream(source: RowSource) -> list[Dataset]:
    """The first rows of each part of a stream that has some."""
    passes = (part.one_pass(Place()) for part in source.parts)
    blocks = (next((block for block in blocks if block.n_rows), None) for blocks in passes)
    return [block.read(range(block.n_rows)) for block in blocks if block is not None]
