"""The documents of a stream: tokenised as its rows come, by every process its own share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unsloth_pack.data.columns import KNOWN_COLUMNS
from unsloth_pack.data.formats import Conversion
from unsloth_pack.data.image_columns import IMAGES
from unsloth_pack.data.raw_blocks import Place, RawBlock, RowSource, endless
from unsloth_pack.data.refusals import telling_names
from unsloth_pack.data.tally import Tally
from unsloth_pack.data.tokenize import (
    DocumentMaker,
    RowHashes,
    SpanMaker,
    check_counted,
    document_schema,
)
from unsloth_pack.errors import InputError, about

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from unsloth_pack.data.ledger import TokenLedger

_FIRST_ROWS = 1000  # that are looked at before the training, or more: whole blocks are


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """Documents that follow one another in a stream, without those in which no label counts.

    Args:
        table: `input_ids` and `labels`, and the images of each where the stream has some.
        tally: counts of the rows that they were made of.
        end: the place after these rows.
        ends_pass: whether the pass over the data is complete.
    """

    table: pa.Table
    tally: Tally
    end: Place
    ends_pass: bool

    def documents(self) -> Iterator[dict[str, Any]]:
        """Each as `[tokens]` int32 arrays of its ids and labels, and a list of its images."""
        columns = {name: self.table[name].combine_chunks() for name in ("input_ids", "labels")}
        ends = np.cumsum(columns["labels"].value_lengths().to_numpy()).tolist()
        flat = {name: column.flatten().to_numpy() for name, column in columns.items()}
        images = self.table[IMAGES].to_pylist() if IMAGES in self.table.column_names else None
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            document: dict[str, Any] = {name: tokens[start:end] for name, tokens in flat.items()}
            yield document if images is None else document | {IMAGES: images[number]}


class StreamedImages(Protocol):
    """What makes documents of rows with images, in a stream of which some parts have such rows.

    Attributes:
        schema: the types of the documents, those without images included.
    """

    schema: pa.Schema

    def are_in(self, rows: datasets.Dataset) -> bool:
        """Whether rows may have images."""

    def maker(self, rows: datasets.Dataset, numbers: range) -> SpanMaker:
        """What makes documents of such rows, which have these numbers."""

    def unused_columns(self, rows: datasets.Dataset) -> tuple[str, ...]:
        """The columns of such rows that nothing is made of."""

    def beside(self, table: pa.Table) -> pa.Table:
        """Documents of rows without images, as those that stand beside documents with images."""


@dataclass(frozen=True)
class Share:
    """Which rows of a stream a process takes: those whose number in the pass, plus the pass, leaves `number`
    when divided by `of`. So a process that gets no row of a small data set gets one in a later pass."""

    number: int = 0
    of: int = 1

    def indices(self, block: RawBlock) -> range:
        """Of its rows in a block."""
        first = (self.number - block.begin.turn - block.begin.seen) % self.of
        return range(first, block.n_rows, self.of)


class DocumentStream:
    """Tokenises the rows of a source, in the format that its first rows have; of each part, if it is mixed.

    Args:
        vocab_size: token ids are below it.
        max_length, responses_only, chat_template: as for `tokenize`.
        images: makes documents of rows with images; None where no row has any.
        check_text: refuses documents of rows without images, of which one is called as its second argument
            says.
        have_images: whether rows may have images, where the first rows have none and the model takes some.

    Attributes:
        first_ledger: the ledger of the first rows, of one block at least of each part.
        fingerprint: of the documents made of them, see `rows_hash`.
        unused_columns: of each part, the columns that nothing is made of, as its first rows have them.

    Raises:
        InputError: the first rows cannot be read or trained on.
    """

    def __init__(
        self,
        source: RowSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        max_length: int,
        responses_only: bool,
        chat_template: str | None,
        images: StreamedImages | None = None,
        check_text: Callable[[pa.Table, str], None] | None = None,
        have_images: Callable[[datasets.Dataset], bool] | None = None,
    ):
        self._images, self._check_text, self._have_images = images, check_text, have_images
        self._source, self._tokenizer, self._vocab_size = source, tokenizer, vocab_size
        self._max_length, self._responses_only = max_length, responses_only
        self._chat_template = chat_template
        self._formats: dict[int, str] = {}
        self._columns: dict[int, list[str]] = {}
        self.unused_columns: dict[int, tuple[str, ...]] = {}
        self.first_ledger, self.fingerprint = self._look_at_first_rows()

    @property
    def n_parts(self) -> int:
        """The sources that are mixed in the stream, 1 where none are."""
        return len(self._source.parts)

    @property
    def has_images(self) -> bool:
        """Whether documents have a list of images, which may be empty."""
        return self._images is not None

    def blocks(
        self, place: Place, share: Share, worker: int = 0, workers: int = 1
    ) -> Iterator[DocumentBlock]:
        """The documents of a share from a place on, without an end.

        Args:
            worker, workers: number of this worker, and how many take turns; each gives its own blocks.

        Raises:
            InputError: a row cannot be read or trained on; names it.
        """
        for turn, block in enumerate(endless(self._source, place)):
            if turn % workers == worker:
                yield self._made(block, share)

    def _look_at_first_rows(self) -> tuple[TokenLedger, str]:
        tally, hashes = Tally(), RowHashes()
        for number, part in enumerate(self._source.parts):
            of_part = Tally()
            for block in endless(part, Place()):
                if block.ends_pass:
                    break
                made = self._made(replace(block, part=number), Share())
                of_part += made.tally
                hashes.update(made.table)
                if of_part.sums["rows_read"] >= _FIRST_ROWS:
                    break
            tally += of_part
        check_counted(tally.ledger, self._max_length)
        return tally.ledger, hashes.hexdigest()

    def _made(self, block: RawBlock, share: Share) -> DocumentBlock:
        import pyarrow as pa

        schema = document_schema() if self._images is None else self._images.schema
        chosen, tally, tables = share.indices(block), Tally(), [schema.empty_table()]
        if chosen:
            begin = block.begin.row
            numbers = range(begin + chosen.start, begin + chosen.stop, chosen.step)
            with about(block.option):
                rows = block.rows(chosen)
            try:
                with telling_names(block.columns):
                    for of_batch, table in self._maker(rows, numbers, block.part).documents(0, len(rows)):
                        tally += of_batch
                        tables.append(self._beside_images(table, numbers))
                    if tally.least_id < 0 or tally.last_id >= self._vocab_size:
                        self._refuse_ids(tally, numbers)
            except InputError as error:
                hint = ""
                if self._have_images is not None and self._have_images(rows):
                    hint = "; the first rows have no images: if later ones do, give --image_folder"
                raise InputError(f"{block.name}: {error}{hint}", about=(*error.about, block.option)) from None
        if self.n_parts > 1:
            tally = tally.of_part(block.part)
        return DocumentBlock(pa.concat_tables(tables), tally, block.end, block.ends_pass)

    def _beside_images(self, table: pa.Table, numbers: range) -> pa.Table:
        """Documents of some of the rows with these numbers, with a column of images if the stream has any."""
        if IMAGES in table.column_names:
            return table
        if self._check_text is not None:
            self._check_text(table, f"rows {numbers[0]} to {numbers[-1]}: document")
        return table if self._images is None else self._images.beside(table)

    def _refuse_ids(self, tally: Tally, numbers: range) -> None:
        wrong = tally.last_id if tally.last_id >= self._vocab_size else tally.least_id
        raise InputError(
            f"rows {numbers[0]} to {numbers[-1]}: token id {wrong} is outside the vocabulary, 0 to "
            f"{self._vocab_size - 1}; tokenise with the tokenizer of this model, or resize its embeddings"
        )

    def _maker(self, rows: datasets.Dataset, numbers: range, part: int) -> SpanMaker:
        """What makes documents of some rows, which have to be as the first rows of their part are."""
        if self._images is not None and self._images.are_in(rows):
            if part not in self.unused_columns:
                self.unused_columns[part] = self._images.unused_columns(rows)
            return self._images.maker(rows, numbers)
        for name in self._columns.get(part, ()):
            if name not in rows.column_names:
                rows = rows.add_column(name, [None] * len(rows))
        conversion = Conversion(
            rows,
            chat_template=bool(self._tokenizer.chat_template),
            responses_only=self._responses_only,
            numbers=numbers,
            template=None if part in self._formats else str(self._tokenizer.chat_template or ""),
        )
        if part not in self._formats:
            self._formats[part] = conversion.data_format
            self._columns[part] = [name for name in rows.column_names if name in KNOWN_COLUMNS]
            self.unused_columns[part] = conversion.unused_columns
        if conversion.data_format != self._formats[part]:
            raise InputError(
                f"rows {numbers[0]} to {numbers[-1]} have the format {conversion.data_format}, and the first "
                f"rows {self._formats[part]}; keep one format a stream"
            )
        return DocumentMaker(
            rows, conversion, self._tokenizer, self._max_length, self._responses_only, self._chat_template
        )
