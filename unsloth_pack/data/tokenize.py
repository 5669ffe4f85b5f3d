"""Turns rows into token ids and labels, with a ledger that accounts for every token that was read.

The ids and labels are the ones that TRL's SFTTrainer would make, and it takes them as they are. TRL's own
preparation truncates silently when it packs, and keeps rows without a label that counts.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from unsloth_pack.data.cache import (
    Notes,
    digest,
    from_cache,
    give_back,
    in_order,
    is_cached,
    memory_maps,
    open_cached,
    scan,
    spans_of,
    write_tables,
)
from unsloth_pack.data.encoding import IGNORE_INDEX, Encoded, Encoder, LabelEncoder
from unsloth_pack.data.formats import Conversion, DataFormat
from unsloth_pack.data.rows import IMAGES, PARTS, update_with_images
from unsloth_pack.data.token_counts import FILES, SpanCounts, TokenLedger
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORE_INDEX", "Documents", "documents_of", "rows_hash", "tokenizer_hash"]

# A tokenizer holds about a hundred bytes for each token of a batch
_ROWS_A_BATCH, _BYTES_A_BATCH = 1000, 1 << 20
_HASHED = 1000  # rows at a time
_HASHED_COLUMNS = ("input_ids", "labels", PARTS)


@dataclass(frozen=True)
class Documents:
    """Tokenised rows: int32 `input_ids` and `labels`, without the rows in which no label counts."""

    rows: datasets.Dataset  # those of a large data set lie in the data set cache
    ledger: TokenLedger
    fingerprint: str  # of the rows, see `rows_hash`; of a mixture, of its data sets and its order
    least_id: int  # the smallest and the largest token id
    last_id: int
    unused_columns: tuple[str, ...] = ()  # of the data set, that nothing was made of
    has_files: bool = False  # whether an image of the data is a file, or may be, as it could not be read


def documents_of(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on_responses_only: bool | None = None,
    chat_template: str | None = None,
    num_proc: int | None = None,
    classes: np.ndarray | None = None,
) -> Documents:
    """Token ids and labels of every row of a data set in any known format, as TRL's SFTTrainer makes them.

    Conversations go through the chat template. Text and string completions end with the end-of-sequence
    token. The loss is on the completion where there is a prompt, else on all tokens. Documents of a large
    data set lie in the data set cache. `train_on_responses_only` is None if nothing is trained on the rows,
    `num_proc` for as many processes as there are cores. `classes`, one for each row, are learned in place of
    the text.
    """
    make = DocumentMaker(
        dataset, tokenizer, max_length, train_on_responses_only, chat_template, classes=classes
    )
    unused = make.conversion.unused_columns(str(tokenizer.chat_template or ""))
    return replace(made_by(make, num_proc), unused_columns=unused)


def made_by(make: SpanMaker, num_proc: int | None = None) -> Documents:
    """All documents that `make` makes of its data set; those of a large one lie in the data set cache."""
    import datasets as hf

    spans = spans_of(len(make.dataset), make.dataset.data.nbytes)
    if len(spans) > 1:
        key = make.key(num_proc)
        folder, notes = from_cache("documents", key, partial(make.all_into, spans=spans, num_proc=num_proc))
        rows = open_cached(folder)
    else:
        tally = SpanCounts()
        rows = hf.Dataset(pa.concat_tables(make.tables(0, len(make.dataset), tally)))
        check_counted(tally.ledger, make.max_length)
        notes = _notes_of(tally, rows_hash(rows))
    return Documents(rows, **notes | {"ledger": TokenLedger(**notes["ledger"])})


def _notes_of(tally: SpanCounts, fingerprint: str) -> Notes:
    """What a `Documents` says beside its rows."""
    ids = {"least_id": tally.least_id, "last_id": tally.last_id}
    has_files = tally.sums[FILES] > 0
    return {"ledger": asdict(tally.ledger), "fingerprint": fingerprint, "has_files": has_files, **ids}


class SpanMaker(ABC):
    """Makes the documents of one data set, one span of its rows after another; `schema` is theirs."""

    def __init__(self, dataset: datasets.Dataset, max_length: int, schema: pa.Schema):
        self.dataset, self.max_length, self.schema = dataset, max_length, schema

    @abstractmethod
    def key(self, num_proc: int | None) -> list[Any] | None:
        """All that the documents depend on, or None where that cannot be told."""

    @property
    def of_data(self) -> list[str]:
        """The data set's fingerprint, which tells how it says it was made, and SHA-256 of its files."""
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        return [self.dataset._fingerprint, *(digest(file) for file in files if not is_cached(file))]

    @abstractmethod
    def documents(self, first: int, end: int) -> Iterator[tuple[SpanCounts, pa.Table]]:
        """The documents of the rows `first` to `end - 1` in which a label counts, and what was counted."""

    def tables(self, first: int, end: int, tally: SpanCounts) -> Iterator[pa.Table]:
        """The same documents, counted in `tally`."""
        for of_batch, table in self.documents(first, end):
            tally += of_batch
            yield table

    @property
    def batch_size(self) -> int:
        """Rows that are worked on at a time."""
        a_row: int = self.dataset.data.nbytes // len(self.dataset) + 1
        return max(1, min(_ROWS_A_BATCH, _BYTES_A_BATCH // a_row))

    def all_into(self, folder: Path, spans: Sequence[tuple[int, int]], num_proc: int | None) -> Notes:
        """Write the documents of all spans, a file each."""
        from datasets.utils import tqdm

        tally = SpanCounts()
        tasks = [(folder / f"{number}.arrow", span) for number, span in enumerate(spans)]
        with tqdm(total=len(self.dataset), desc="Tokenizing", unit=" rows") as bar:
            results = in_order(self._one_into, tasks, num_proc)
            for (first, end), of_span in zip(spans, results, strict=True):
                tally += of_span
                bar.update(end - first)
        check_counted(tally.ledger, self.max_length)
        return _notes_of(tally, rows_hash(open_cached(folder)))

    def _one_into(self, task: tuple[Path, tuple[int, int]]) -> SpanCounts:
        file, span = task
        tally = SpanCounts()
        write_tables(file, self.tables(*span, tally))
        give_back(memory_maps(self.dataset))
        return tally


class DocumentMaker(SpanMaker):
    """Makes the documents of a data set of text, see `documents_of`; `numbers` of its rows are for errors."""

    def __init__(
        self,
        dataset: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        responses_only: bool | None,
        chat_template: str | None,
        numbers: range | None = None,
        classes: np.ndarray | None = None,
    ):
        super().__init__(dataset, max_length, document_schema())
        self._classes = classes
        has_template = bool(tokenizer.chat_template)
        self.conversion = Conversion(
            dataset, chat_template=has_template, responses_only=responses_only, numbers=numbers
        )
        if classes is not None and self.conversion.data_format is not DataFormat.TEXT:
            raise InputError(
                f"task classify reads a column text, and the rows are {self.conversion.data_format.value}; "
                "name it with --columns NAME=text"
            )
        encoder = Encoder if classes is None else partial(LabelEncoder, classes=classes)
        self.encoder = encoder(
            tokenizer,
            self.conversion.columns,
            self.conversion.holds_turns,
            max_length=max_length,
            responses_only=bool(responses_only),
            chat_template=chat_template,
        )

    def key(self, num_proc: int | None) -> list[Any] | None:
        of_tokenizer = key_of_tokenizer(self.encoder.tokenizer, self.encoder.chat_template)
        if of_tokenizer is None:
            return None
        classes = [] if self._classes is None else [hashlib.sha256(self._classes.tobytes()).hexdigest()]
        return [self.of_data, self.conversion.key, of_tokenizer, self.max_length, *classes]

    def documents(self, first: int, end: int) -> Iterator[tuple[SpanCounts, pa.Table]]:
        size, columns = self.batch_size, self.conversion.columns
        rows = self.conversion.rows(first, end, size)
        for start in range(first, end, size):
            some = list(islice(rows, size))
            batch = {name: [row[name] for row in some] for name in columns}
            encoded = self.encoder(batch, self.conversion.numbers[start : start + len(some)])
            yield SpanCounts.of(encoded), table_of(encoded)

    def prompts(self) -> list[list[int]]:
        """Token ids of the prompt of every row, up to where the answer begins."""
        columns, n_rows = self.conversion.columns, len(self.dataset)
        if "prompt" not in columns:
            raise InputError(
                f"rows of the format {self.conversion.data_format} have no prompt; give a column prompt"
            )
        rows = list(self.conversion.rows(0, n_rows, n_rows))
        return self.encoder.prompts({n: [row[n] for row in rows] for n in columns}, self.conversion.numbers)


def check_counted(ledger: TokenLedger, max_length: int) -> None:
    """Refuse documents of which nothing is learned."""
    if ledger.rows_broken and ledger.rows_broken == ledger.rows_read:
        raise InputError(
            f"each of the {ledger.rows_read} rows has an image that cannot be used, and skip_broken_images "
            "leaves them out; leave out --skip_broken_images to see the first"
        )
    if not ledger.tokens_counted:
        raise InputError(
            f"none of the {ledger.tokens_read} tokens in {ledger.rows_read} rows would count in the loss "
            f"({ledger.tokens_truncated} lie beyond max_seq_length {max_length}); raise max_seq_length, or "
            "give data with responses"
        )


def document_schema(*more: str) -> pa.Schema:
    """The types of tokenised rows, with more columns of one whole number a token."""
    return pa.schema(dict.fromkeys(("input_ids", "labels", *more), pa.list_(pa.int32())))


def table_of(encoded: Encoded, more: Mapping[str, np.ndarray] | None = None) -> pa.Table:
    """The documents in which a label counts; `more` are further columns, `[tokens]` int32."""
    stays = encoded.counted > 0
    numbers, lengths = {"input_ids": encoded.ids, "labels": encoded.labels, **(more or {})}, encoded.kept
    if not stays.all():
        of_tokens = np.repeat(stays, lengths)
        numbers, lengths = {name: x[of_tokens] for name, x in numbers.items()}, lengths[stays]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = [pa.ListArray.from_arrays(offsets, pa.array(tokens)) for tokens in numbers.values()]
    return pa.Table.from_arrays(columns, schema=document_schema(*(more or {})))


class RowHashes:
    """SHA-256 of rows that come in one batch after another: of their lengths and values, column by column."""

    def __init__(self) -> None:
        self._hashes = defaultdict[str, Any](hashlib.sha256)

    def update(self, table: pa.Table) -> None:
        for name in (name for name in _HASHED_COLUMNS if name in table.column_names):
            lists = table[name].combine_chunks()
            self._hashes[f"lengths of {name}"].update(lists.value_lengths().to_numpy())
            self._hashes[name].update(lists.flatten().to_numpy())
        if IMAGES in table.column_names:
            update_with_images(self._hashes[IMAGES], table[IMAGES])

    def hexdigest(self) -> str:
        return hashlib.sha256(b"".join(one.digest() for one in self._hashes.values())).hexdigest()


def rows_hash(rows: datasets.Dataset) -> str:
    """Hash rows in their order, with SHA-256: every id, label and image, and where each row ends."""
    hashes = RowHashes()
    columns = [name for name in (*_HASHED_COLUMNS, IMAGES) if name in rows.column_names]
    for table in scan(rows, columns, _HASHED):
        hashes.update(table)
    return hashes.hexdigest()


def key_of_tokenizer(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> list[Any] | None:
    """All that ids depend on beside the rows; None for a slow tokenizer, which does things in Python."""
    if not tokenizer.is_fast:
        return None
    import tokenizers
    import transformers

    kind = type(tokenizer)
    is_dated = "strftime_now" in str(chat_template or tokenizer.chat_template)
    return [
        [tokenizer_hash(tokenizer), kind.__module__, kind.__qualname__, tokenizer.split_special_tokens],
        [chat_template, str(date.today()) if is_dated else None],
        [module.__version__ for module in (transformers, tokenizers)],
    ]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash all that turns rows into ids, the same on every machine and after saving and loading.

    It covers the vocabulary, the rules, the special tokens and the chat template. It leaves out padding and
    truncation, which a tokenizer remembers from its last call, and the padding token, which trainers set.
    """
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    else:
        model = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"
    }
    whole = json.dumps([model, special, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def check_token_ids(dataset: datasets.Dataset, vocab_size: int, column: str = "input_ids") -> None:
    """Refuse ids that the model does not have; on a GPU they would fail an assertion that names no row."""
    import pyarrow.compute as pc

    start = 0
    for table in scan(dataset, [column], batch_size=256):
        lists = table[column].combine_chunks()
        ids, row_of_id = lists.flatten(), pc.list_parent_indices(lists)
        valid = pc.and_(pc.greater_equal(ids, 0), pc.less(ids, vocab_size)).fill_null(False)
        first = pc.index(valid, False).as_py()
        if first >= 0:
            raise InputError(
                f"row {start + row_of_id[first].as_py()}, column {column!r}: token id {ids[first]} is "
                f"outside the vocabulary, 0 to {vocab_size - 1} ({vocab_size} ids); tokenise with the "
                "tokenizer of this model, or resize its embeddings"
            )
        start += len(lists)
