"""Turns rows into token ids and labels, with a ledger that accounts for every token that was read.

The ids and labels are the ones that TRL's SFTTrainer would make, and it takes them as they are. TRL's own
preparation truncates silently when it packs, and keeps rows without a label that counts.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.cache import (
    Notes,
    arrow_file,
    digest,
    from_cache,
    in_order,
    is_cached,
    open_cached,
    release,
    scan,
    spans_of,
)
from unsloth_pack.data.encoding import IGNORE_INDEX, Encoded, Encoder
from unsloth_pack.data.rows import IMAGES, update_with_images
from unsloth_pack.data.token_counts import SpanCounts, TokenLedger
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from unsloth_pack.data.formats import Conversion

__all__ = ["IGNORE_INDEX", "Documents", "documents_of", "rows_hash", "tokenize", "tokenizer_hash"]

# A tokenizer holds about a hundred bytes for each token of a batch
_ROWS_A_BATCH, _BYTES_A_BATCH = 1000, 1 << 20
_HASHED = 1000  # rows at a time


@dataclass(frozen=True)
class Documents:
    """Tokenised rows.

    Args:
        rows: `input_ids` and `labels`, int32 lists of the same length, without the rows in which no label
            counts. Those of a large data set lie in the data set cache.
        ledger: where the tokens of the data went.
        fingerprint: of the rows, see `rows_hash`; of a mixture, of its data sets and its order.
        least_id, last_id: the smallest and the largest token id.
        unused_columns: columns of the data set that nothing was made of.
        has_files: whether an image of the data is a file, or may be, as it could not be read.
    """

    rows: datasets.Dataset
    ledger: TokenLedger
    fingerprint: str
    least_id: int
    last_id: int
    unused_columns: tuple[str, ...] = ()
    has_files: bool = False


def tokenize(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on_responses_only: bool = False,
    chat_template: str | None = None,
    num_proc: int | None = None,
) -> tuple[datasets.Dataset, TokenLedger]:
    """Token ids and labels of every row, as TRL's SFTTrainer would make them.

    Conversations go through the chat template. Text and string completions end with the end-of-sequence
    token. The loss is on the completion where there is a prompt, else on all tokens.

    Args:
        dataset: columns as `to_trl` gives them: prompt and completion, or messages, with what
            the template reads beside them (tools, chat_template_kwargs); or text.
        max_length: tokens at which a row is cut; its end is lost.
        train_on_responses_only: in conversations, only assistant turns count in the loss.
        chat_template: used instead of the tokenizer's own.
        num_proc: processes that share out the rows; None for as many as there are cores.

    Returns:
        A dataset of `input_ids` and `labels`, int32 lists of the same length, without the rows in which no
        label counts; and the ledger.

    Raises:
        InputError: no row is left; only responses are to be trained on, and the rows are plain text or the
            template does not mark responses; the template refuses a row; or the tokenizer has no
            end-of-sequence token.
    """
    documents = documents_of(
        dataset,
        tokenizer,
        max_length=max_length,
        train_on_responses_only=train_on_responses_only,
        chat_template=chat_template,
        num_proc=num_proc,
    )
    return documents.rows, documents.ledger


def documents_of(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on_responses_only: bool = False,
    chat_template: str | None = None,
    num_proc: int | None = None,
    conversion: Conversion | None = None,
) -> Documents:
    """The tokenised rows of a data set, see `tokenize`.

    A large data set is tokenised over several processes, into the data set cache. The next call with the same
    data, tokenizer and arguments finds the documents there.

    Args:
        conversion: makes TRL's columns of the rows, which are converted and tokenised a batch at a time;
            None if the data set has these columns.
    """
    make = DocumentMaker(dataset, conversion, tokenizer, max_length, train_on_responses_only, chat_template)
    return made_by(make, num_proc)


def made_by(make: SpanMaker, num_proc: int | None = None) -> Documents:
    """All documents that `make` makes of its data set; those of a large one lie in the data set cache.

    Raises:
        InputError: what `make` raises; or nothing is learned from them.
    """
    dataset = make.dataset
    spans = spans_of(len(dataset), dataset.data.nbytes)
    if len(spans) > 1:
        key = make.key(num_proc)
        folder, notes = from_cache("documents", key, partial(make.all_into, spans=spans, num_proc=num_proc))
        rows = open_cached(folder)
        found = {name: notes[name] for name in ("fingerprint", "least_id", "last_id", "has_files")}
        return Documents(rows, TokenLedger(**notes["ledger"]), **found)
    import datasets as hf
    import pyarrow as pa

    tally, tables = SpanCounts(), []
    for of_batch, table in make.documents(0, len(dataset)):
        tally += of_batch
        tables.append(table)
    check_counted(tally.ledger, make.max_length)
    rows = hf.Dataset(pa.concat_tables(tables))
    hashed, has_files = rows_hash(rows), tally.has_files
    return Documents(rows, tally.ledger, hashed, tally.least_id, tally.last_id, has_files=has_files)


class SpanMaker(ABC):
    """Makes the documents of one data set, one span of its rows after another.

    Args:
        dataset: whose rows become documents.
        max_length: tokens of the longest document.
        schema: of the documents.
    """

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

    @property
    def batch_size(self) -> int:
        """Rows that are worked on at a time."""
        a_row = self.dataset.data.nbytes // len(self.dataset) + 1
        return max(1, min(_ROWS_A_BATCH, _BYTES_A_BATCH // a_row))

    def all_into(self, folder: Path, spans: Sequence[tuple[int, int]], num_proc: int | None) -> Notes:
        """Write the documents of all spans, a file each, and return what a `Documents` says of them."""
        from datasets.utils import tqdm

        tally, hashes = SpanCounts(), RowHashes()
        tasks = [(folder, number, span) for number, span in enumerate(spans)]
        with tqdm(total=len(self.dataset), desc="Tokenizing", unit=" rows") as bar:
            for (_, number, (first, end)), of_span in zip(
                tasks, in_order(self._one_into, tasks, num_proc), strict=True
            ):
                tally += of_span
                hashes.update_from(folder / f"{number}.arrow")
                bar.update(end - first)
        check_counted(tally.ledger, self.max_length)
        about = {"least_id": tally.least_id, "last_id": tally.last_id, "has_files": tally.has_files}
        return {"ledger": asdict(tally.ledger), "fingerprint": hashes.hexdigest(), **about}

    def _one_into(self, task: tuple[Path, int, tuple[int, int]]) -> SpanCounts:
        folder, number, (first, end) = task
        tally = SpanCounts()
        with arrow_file(folder / f"{number}.arrow", self.schema) as stream:
            for of_batch, table in self.documents(first, end):
                tally += of_batch
                stream.write_table(table)
        release(self.dataset)
        return tally


class DocumentMaker(SpanMaker):
    """Makes the documents of a data set of text."""

    def __init__(
        self,
        dataset: datasets.Dataset,
        conversion: Conversion | None,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        responses_only: bool,
        chat_template: str | None,
    ):
        import datasets as hf

        super().__init__(dataset, max_length, document_schema())
        self._conversion = conversion
        features = dataset.features if conversion is None else conversion.features
        kind = next(features[name] for name in ("prompt", "messages", "text") if name in features)
        self._encode = Encoder(
            tokenizer,
            list(features),
            not isinstance(kind, hf.Value),
            max_length=max_length,
            responses_only=responses_only,
            chat_template=chat_template,
        )
        self._responses_only = responses_only

    def key(self, num_proc: int | None) -> list[Any] | None:
        given = key_of_tokenizer(self._encode.tokenizer, self._encode.chat_template)
        if given is None:
            return None
        return [
            self.of_data,
            None if self._conversion is None else self._conversion.key,
            given,
            [self.max_length, self._responses_only],
        ]

    def documents(self, first: int, end: int) -> Iterator[tuple[SpanCounts, pa.Table]]:
        size = self.batch_size
        if self._conversion is None:
            batches = self.dataset.select(range(first, end)).iter(batch_size=size)
        else:
            batches = self._conversion.batches(self.dataset, first, end, size)
        numbers = range(len(self.dataset)) if self._conversion is None else self._conversion.numbers
        for start, batch in zip(range(first, end, size), batches, strict=True):
            encoded = self._encode(batch, numbers[start : min(start + size, end)])
            yield SpanCounts.of(encoded), table_of(encoded)


def check_counted(ledger: TokenLedger, max_length: int) -> None:
    """Refuse documents of which nothing is learned."""
    if ledger.rows_broken and ledger.rows_broken == ledger.rows_read:
        raise InputError(
            f"each of the {ledger.rows_read} rows has an image that cannot be used, and skip_broken_images "
            "leaves them out; leave out --skip_broken_images to see the first",
            about="skip_broken_images",
        )
    if not ledger.tokens_counted:
        raise InputError(
            f"none of the {ledger.tokens_read} tokens in {ledger.rows_read} rows would count in the loss "
            f"({ledger.tokens_truncated} lie beyond max_seq_length {max_length}); raise max_seq_length, or "
            "give data with responses",
            about="max_seq_length",
        )


def document_schema() -> pa.Schema:
    """The types of tokenised rows."""
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    return pa.schema({"input_ids": tokens, "labels": tokens})


def table_of(encoded: Encoded) -> pa.Table:
    """The documents in which a label counts."""
    import pyarrow as pa

    stays = encoded.counted > 0
    ids, labels, lengths = encoded.ids, encoded.labels, encoded.kept
    if not stays.all():
        of_tokens = np.repeat(stays, lengths)
        ids, labels, lengths = ids[of_tokens], labels[of_tokens], lengths[stays]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = [pa.ListArray.from_arrays(offsets, pa.array(tokens)) for tokens in (ids, labels)]
    return pa.Table.from_arrays(columns, schema=document_schema())


class RowHashes:
    """SHA-256 of rows that come in one batch after another: of their lengths and values, column by column."""

    def __init__(self) -> None:
        self._hashes = [hashlib.sha256() for _ in range(4)]
        self._of_images = hashlib.sha256()
        self._has_images = False

    def update(self, table: pa.Table | pa.RecordBatch) -> None:
        columns = [table[name] for name in ("input_ids", "labels")]
        arrays = [column.combine_chunks() if hasattr(column, "chunks") else column for column in columns]
        parts = [part for array in arrays for part in (array.value_lengths(), array.flatten())]
        for one, part in zip(self._hashes, parts, strict=True):
            one.update(part.to_numpy())
        if IMAGES in table.schema.names:
            self._has_images = True
            update_with_images(self._of_images, table[IMAGES])

    def update_from(self, path: Path) -> None:
        """Add the rows of an Arrow file, which is read without mapping it into memory."""
        import pyarrow as pa

        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                self.update(batch)

    def hexdigest(self) -> str:
        hashes = [*self._hashes, *([self._of_images] if self._has_images else [])]
        return hashlib.sha256(b"".join(one.digest() for one in hashes)).hexdigest()


def rows_hash(rows: datasets.Dataset) -> str:
    """SHA-256 of the rows in their order: every id, label and image, and where each row ends."""
    hashes = RowHashes()
    columns = [name for name in ("input_ids", "labels", IMAGES) if name in rows.column_names]
    for table in scan(rows, columns, _HASHED):
        hashes.update(table)
    return hashes.hexdigest()


def key_of_tokenizer(tokenizer: Any, chat_template: str | None = None) -> list[Any] | None:
    """All that ids depend on beside the rows; None for a slow tokenizer, which does things in Python.

    Args:
        chat_template: used instead of the tokenizer's own.
    """
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
    """SHA-256 of all that turns rows into ids, the same on every machine and after saving and loading.

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
