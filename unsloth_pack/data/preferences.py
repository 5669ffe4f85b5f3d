"""Turns answers that somebody prefers or rejects into documents: a prompt with its answers.

- objective dpo or orpo: `chosen` and `rejected`, with `prompt` (or `instruction`, `input`) or as two whole
  conversations or texts, which then begin with the same prompt;
- objective kto: `prompt`, `completion` and a `label`, true or false. A document also gets the completion of
  another, as far as it fits: for KTO's KL term.

What is longer than a row is dropped, and counted as truncated.

Ids are the ones that TRL's trainers make. An answer begins where the tokens of prompt and answer together
differ from those of the prompt, or of the other answer's prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.columns import refuse_text_of_turns
from unsloth_pack.data.encoding import IGNORE_INDEX, Encoded, common_prefix
from unsloth_pack.data.formats import DataFormat
from unsloth_pack.data.rows import CHOSEN, PARTS, REJECTED, Row, fail, offer
from unsloth_pack.data.token_counts import SpanCounts
from unsloth_pack.data.tokenize import DocumentMaker, Documents, SpanMaker, document_schema, made_by, table_of
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

Answer = tuple[list[int], int]  # the ids of a prompt with an answer, and where that begins
_PAIR = ("chosen", "rejected")
_REMEDY = "correct or remove the row"
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # also as text


def preferences_of(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    objective: str,
    num_proc: int | None = None,
) -> Documents:
    """Token ids, labels and parts of every row, see `PreferenceMaker`; as `documents_of`."""
    make = PreferenceMaker(dataset, tokenizer, max_length, objective)
    return replace(made_by(make, num_proc), unused_columns=make.unused_columns)


class PreferenceMaker(SpanMaker):
    """Makes documents of the rows of a data set for the objective dpo, orpo or kto.

    Raises:
        InputError: the columns are not those of the objective, or a row has equal or empty answers or no
            label.
    """

    def __init__(
        self, dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, objective: str
    ):
        self._columns = ("completion",) if objective == "kto" else _PAIR
        self._labels = None
        if objective == "kto":
            self._labels, dataset = _labels_of(dataset)
        else:
            dataset = _with_prompts(dataset)
        super().__init__(dataset, max_length, document_schema(PARTS))
        self._objective = objective
        self._makers = [self._maker(name, tokenizer) for name in self._columns]
        conversion = self._makers[0].conversion
        self.unused_columns = conversion.unused_columns(str(tokenizer.chat_template or ""))

    def _maker(self, answer: str, tokenizer: PreTrainedTokenizerBase) -> DocumentMaker:
        """Return what encodes the rows as those of a prompt and this answer alone."""
        to = "output" if "instruction" in self.dataset.column_names else "completion"
        rows = self.dataset.remove_columns([name for name in self._columns if name != answer])
        rows = rows.rename_column(answer, to) if answer in rows.column_names and answer != to else rows
        maker = DocumentMaker(rows, tokenizer, self.max_length, None, None)
        if maker.conversion.data_format not in (DataFormat.PROMPT_COMPLETION, DataFormat.ALPACA):
            raise InputError(f"column {answer!r} comes without a prompt; give columns prompt and {answer}")
        return maker

    def key(self, num_proc: int | None) -> list[Any] | None:
        labels = None if self._labels is None else hashlib.sha256(self._labels.tobytes()).hexdigest()
        key = self._makers[0].key(num_proc)  # its fingerprint is of the whole data set
        return None if key is None else [self._objective, key, labels]

    def documents(self, first: int, end: int) -> Iterator[tuple[SpanCounts, pa.Table]]:
        size = self.batch_size
        rows = [self._rows(number, first, end) for number in range(len(self._columns))]
        for start in range(first, end, size):
            numbers = range(start, min(start + size, end))
            answers = [self._ids(list(islice(each, size)), numbers) for each in rows]
            if self._labels is None:
                documents = [self._pair(*each) for each in zip(numbers, *answers, strict=True)]
            else:
                documents = self._labelled(numbers, answers[0])
            encoded, parts = _encoded(documents, self.max_length)
            yield SpanCounts.of(encoded), table_of(encoded, {PARTS: parts})

    def _rows(self, number: int, first: int, end: int) -> Iterator[Row]:
        """Convert rows with one of the answers; errors name its column."""
        try:
            yield from self._makers[number].conversion.rows(first, end, self.batch_size)
        except InputError as error:
            named = f"column {self._columns[number]!r}"
            message = str(error).replace("column 'completion'", named).replace("column 'output'", named)
            raise InputError(message) from None

    def _ids(self, rows: list[Row], numbers: range) -> list[Answer]:
        batch = {name: [row[name] for row in rows] for name in rows[0]}
        ids, starts, _, _ = self._makers[0].encoder.encode(batch, numbers)
        return list(zip(ids, starts.tolist(), strict=True))

    def _pair(self, number: int, chosen: Answer, rejected: Answer) -> list[list[int]]:
        if chosen[0] == rejected[0]:
            raise InputError(f"row {number}: chosen and rejected are equal; {_REMEDY}")
        start = min(chosen[1], rejected[1])
        return [chosen[0][:start], chosen[0][start:], rejected[0][start:]]

    def _labelled(self, numbers: range, answers: list[Answer]) -> list[list[list[int]]]:
        assert self._labels is not None
        completions = [ids[start:] for ids, start in answers]
        documents = []
        for place, (number, (ids, start)) in enumerate(zip(numbers, answers, strict=True)):
            other = completions[place - 1] if len(answers) > 1 else []
            parts = [ids[:start], [], [], other[: max(0, self.max_length - len(ids))]]
            parts[CHOSEN if self._labels[number] else REJECTED] = completions[place]
            documents.append(parts)
        return documents


def _with_prompts(dataset: datasets.Dataset) -> datasets.Dataset:
    """Take the prompt out of both answers where it has no column, or where their conversations repeat it."""
    names = {*dataset.column_names}
    if not {*_PAIR} <= names:
        raise InputError(f"the columns are {', '.join(dataset.column_names)}; give chosen and rejected")
    first = dataset[0] if len(dataset) else {}
    refuse_text_of_turns(_PAIR, [first])
    chosen, prompt = first.get("chosen"), first.get("prompt")
    repeats = isinstance(chosen, list) and (
        isinstance(prompt, str) or (isinstance(prompt, list) and prompt == chosen[: len(prompt)])
    )
    unread = names & {"messages", *(["prompt"] if repeats else [])}
    dataset = dataset.remove_columns([*unread])
    if (names - unread) & {"prompt", "instruction"} or not len(dataset):
        return dataset
    return dataset.map(_split_prompt, desc="Splitting prompts from answers")


def _split_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Take out what both answers begin with, as TRL's `extract_prompt`: whole turns, or text."""
    chosen, rejected = (row[name] for name in _PAIR)
    if not all(isinstance(each, str | list) for each in (chosen, rejected)):
        return {"prompt": ""}  # `Conversion` refuses the answers
    n = common_prefix(chosen, rejected)
    if n == min(len(chosen), len(rejected)) or chosen[n - 1 : n] == " ":
        n = max(0, n - 1)  # something is left of each answer, and a space belongs to it
    return {"prompt": chosen[:n], "chosen": chosen[n:], "rejected": rejected[n:]}


def _labels_of(dataset: datasets.Dataset) -> tuple[np.ndarray, datasets.Dataset]:
    """Return `[rows]` bool, whether an answer is desirable, and the rows without that column."""
    if "label" not in dataset.column_names:
        if {*_PAIR} <= {*dataset.column_names}:
            raise InputError("columns chosen, rejected are pairs; give --objective dpo or orpo")
        ways = offer({dataset.column_names[-1]: "label"})
        raise InputError(f"no column label says which answers are good; name it, such as {ways}")
    labels = [_LABELS.get(str(label).strip().lower()) for label in dataset["label"]]
    if None in labels:
        number = labels.index(None)
        fail(number, "label", "expected true or false", dataset[number]["label"], _REMEDY)
    return np.array(labels, bool), dataset.remove_columns("label")


def _encoded(documents: list[list[list[int]]], max_length: int) -> tuple[Encoded, np.ndarray]:
    """Return documents from the ids of their parts, and `[tokens]` to which part each belongs.

    Of those that are longer than `max_length` nothing is left, as if they had been cut at their beginning.
    """
    lengths = np.array([[*map(len, parts)] for parts in documents])
    read = lengths.sum(axis=1)
    fits = read <= max_length
    ids = [token for document in compress(documents, fits) for part in document for token in part]
    parts = np.tile(np.arange(lengths.shape[1], dtype=np.int32), len(documents))
    parts = np.repeat(parts, (lengths * fits[:, None]).ravel())
    ids_N = np.array(ids, np.int32)
    labels_N = np.where((parts == CHOSEN) | (parts == REJECTED), ids_N, np.int32(IGNORE_INDEX))
    return Encoded.from_labels(ids_N, labels_N, read, read * fits, np.zeros_like(read)), parts
