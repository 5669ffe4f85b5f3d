"""`train_on_responses_only`: limit the loss to answers, which are found among the token ids.

A tokenizer may merge the ends of a marker with the text around it. So markers are found in the decoded text,
whose bytes tell the tokens.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

import numpy as np

from unsloth_pack.chat_templates.templates import get_parts
from unsloth_pack.data.encoding import IGNORE_INDEX, marks_answers
from unsloth_pack.errors import InputError, printable

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback
_PREFIX = "a"  # some decoders strip a leading space
COUNTS = "counts of answers"  # a column of `AnswerCounts`, until they are summed
_FIRST_ROWS = 1000  # of a stream, which must contain an answer
_EXCERPT = 160  # characters of a document in an error
_ROW_COLUMNS = ("input_ids", "labels", "seq_lengths")

logger = logging.getLogger("unsloth_pack")


@dataclass(frozen=True, eq=False)
class DocumentText:
    """The text of one document, and the ends of its tokens.

    Args:
        text: in UTF-8, because a letter may span several tokens.
        ends: `[tokens]` int64, in bytes of `text`.
    """

    text: bytes
    ends: np.ndarray

    def spans(self, marker: str) -> list[tuple[int, int]]:
        """List the first token of every occurrence of a marker, and the first token after it.

        A token with the end of the marker and further text belongs to that text. A token with its beginning
        belongs to the marker.
        """
        places = [match.span() for match in re.finditer(re.escape(marker.encode()), self.text)]
        firsts, lasts = np.searchsorted(self.ends, np.asarray(places, np.int64).reshape(-1, 2).T, "right")
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


class TokenTexts:
    """Decode token ids one by one, so that a place in the text tells the token."""

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._byte_of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
        (self._prefix, *_) = tokenizer(_PREFIX, add_special_tokens=False)["input_ids"]
        self._n_prefix = len(self._decode([self._prefix]))
        self._texts: dict[int, bytes] = {}

    def __call__(self, ids: np.ndarray) -> DocumentText:
        """Decode a document of `[tokens]` ids."""
        parts = [self._decode_token(token) for token in ids.tolist()]
        return DocumentText(b"".join(parts), np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))))

    def _decode_token(self, token: int) -> bytes:
        if token not in self._texts:
            text = self._decode([self._prefix, token])[self._n_prefix :]
            self._texts[token] = self._decode_bytes(token) if "\ufffd" in text else text.encode()
        return self._texts[token]

    def _decode_bytes(self, token: int) -> bytes:
        """Return the bytes of a part of a letter, in a vocabulary of bytes or with byte fallback."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return bytes(self._byte_of_letter[letter] for letter in piece if letter in self._byte_of_letter)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class AnswerCounts:
    """Counts of documents, of those without a marker, and of tokens in the loss."""

    documents: int = 0
    without_question: int = 0
    without_answer: int = 0
    labels: int = 0

    def __add__(self, other: "AnswerCounts") -> "AnswerCounts":
        return AnswerCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class AnswerLabels:
    """Label documents: the ids after `answer`, up to the next `question`, and -100 elsewhere.

    Args:
        question, answer: the markers, without loss themselves.
    """

    def __init__(self, question: str, answer: str, tokenizer: Any):
        self._question, self._answer = question, answer
        self._texts = TokenTexts(tokenizer)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the columns `labels` and `COUNTS` of a batch. Its labels of -100 stay -100.

        Args:
            batch: `input_ids`, and perhaps `labels` and the `seq_lengths` of packed rows.
        """
        nones = [None] * len(batch["input_ids"])
        columns = (batch["input_ids"], batch.get("labels") or nones, batch.get("seq_lengths") or nones)
        results = [self.label_row(*row) for row in zip(*columns, strict=True)]
        counts = [list(astuple(counts)) for _, counts in results]
        return {"labels": [labels for labels, _ in results], COUNTS: counts}

    def label_row(
        self, input_ids: Sequence[int], old_labels: Sequence[int] | None, seq_lengths: Any
    ) -> tuple[np.ndarray, AnswerCounts]:
        """Return the labels `[tokens]` of one row, and its counts."""
        ids = np.asarray(input_ids, np.int64)
        is_packed = np.ndim(seq_lengths) == 1  # a column of plain numbers is not from packing
        ends = np.cumsum(seq_lengths if is_packed else [len(ids)])
        labels, counts = np.full(len(ids), IGNORE_INDEX), AnswerCounts()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            document = ids[begin:end]
            text = self._texts(document)
            questions, answers = text.spans(self._question), text.spans(self._answer)
            for first, last in _find_answers(questions, answers, len(document)):
                labels[begin + first : begin + last] = document[first:last]
            if old_labels is not None:
                labels[begin:end][np.asarray(old_labels[begin:end]) == IGNORE_INDEX] = IGNORE_INDEX
            learned = int((labels[begin + 1 : end] != IGNORE_INDEX).sum())
            counts += AnswerCounts(1, not questions, not answers, learned)
        return labels, counts


def _find_answers(
    questions: list[tuple[int, int]], answers: list[tuple[int, int]], n_tokens: int
) -> list[tuple[int, int]]:
    """Return begin and end of each answer: it ends at the next marker, or with the document."""
    marks = sorted([*(begin for begin, _ in questions), *(begin for begin, _ in answers), n_tokens])
    return [(end, next(mark for mark in marks if mark >= end)) for _, end in answers]


def train_on_responses_only(
    trainer: Any,
    instruction_part: str | None = None,
    response_part: str | None = None,
    tokenizer: Any = None,
    num_proc: int | None = None,
) -> Any:
    """Limit the labels of a trainer's data sets to answers, and return the trainer.

    An answer is the text after `response_part`, up to the next `instruction_part` or the end of its document.
    The markers are found among the token ids, in packed rows document by document. Labels of -100 stay -100.
    Rows without a label are dropped, and a warning counts the documents without a marker.

    ```python
    trainer = train_on_responses_only(
        trainer,
        instruction_part="<|im_start|>user\\n",
        response_part="<|im_start|>assistant\\n",
    )
    ```

    Args:
        trainer: TRL's `SFTTrainer`, or any with tokenised data sets: lists or streams, packed or not.
        instruction_part, response_part: the chat template's text before a question and before an answer.
            Optional if `get_chat_template` set the tokenizer's template by name.
        tokenizer: None for the trainer's.
        num_proc: processes for a data set that does not stream.

    Raises:
        InputError: a marker is in no document, or no label is left; rows without `input_ids`; a collator with
            labels of its own. The trainer then stays as it was.
    """
    tokenizer = tokenizer or getattr(trainer, "processing_class", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None or getattr(trainer, "train_dataset", None) is None:
        raise InputError("trainer has no tokenizer or no train_dataset; make it with both before this call")
    question, answer = _markers(instruction_part, response_part, tokenizer)
    first = getattr(getattr(trainer, "args", None), "main_process_first", nullcontext)
    with first():
        labelled = {
            (name, key): _Labeller(f"{name} {key}".strip(), question, answer, tokenizer)(dataset, num_proc)
            for name in ("train_dataset", "eval_dataset")
            for key, dataset in _name_datasets(getattr(trainer, name, None))
        }
    _check_collator(trainer, labelled["train_dataset", ""])
    for (name, key), dataset in labelled.items():
        if key:
            setattr(trainer, name, {**getattr(trainer, name), key: dataset})
        else:
            setattr(trainer, name, dataset)
    return trainer


def _markers(question: Any, answer: Any, tokenizer: Any) -> tuple[str, str]:
    known = get_parts(tokenizer)
    if (question is None or answer is None) and known is None:
        raise InputError(
            f"instruction_part is {question!r} and response_part {answer!r}; give what the chat template "
            "puts before a question and before an answer"
        )
    if known is not None:
        question, answer = question or known[0], answer or known[1]
    if question == answer:
        raise InputError(f"instruction_part and response_part are both {question!r}; they have to differ")
    for name, text in (("instruction_part", question), ("response_part", answer)):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name} is {text!r}; give the text that the chat template puts before a turn")
    return question, answer


def _name_datasets(datasets: Any) -> list[tuple[str, Any]]:
    """List data sets with the keys of their dict, "" for a single one."""
    if datasets is None:
        return []
    return list(datasets.items()) if isinstance(datasets, Mapping) else [("", datasets)]


class _Labeller:
    """Label one data set; `name` is for errors."""

    def __init__(self, name: str, question: str, answer: str, tokenizer: Any):
        self._name, self._tokenizer = name, tokenizer
        self._question, self._answer = question, answer
        self._labels = AnswerLabels(question, answer, tokenizer)

    def __call__(self, dataset: Any, num_proc: int | None) -> Any:
        row = next(iter(dataset), None)
        if row is None or "input_ids" not in row:
            problem = "has no rows" if row is None else f"has the columns {', '.join(row)}"
            raise InputError(f"{self._name} {problem}; give the trainer rows that it turns into input_ids")
        if hasattr(dataset, "__len__"):
            return self._label_rows(dataset, num_proc)
        return self._label_stream(dataset)

    def _label_rows(self, dataset: Any, num_proc: int | None) -> Any:
        labelled = dataset.map(self._labels, batched=True, num_proc=num_proc, desc="Finding answers")
        counts = [
            AnswerCounts(*row)
            for batch in labelled.select_columns([COUNTS]).with_format(None).iter(batch_size=1000)
            for row in batch[COUNTS]
        ]
        total = sum(counts, AnswerCounts())
        self._check(total, dataset[0], "")
        learned = [place for place, row in enumerate(counts) if row.labels]
        dropped = len(counts) - len(learned)
        if dropped or total.without_question or total.without_answer:
            logger.warning("%s: %s; %d rows without a label are dropped", *self._describe(total), dropped)
        labelled = labelled.remove_columns([COUNTS])
        return labelled.select(learned) if dropped else labelled

    def _label_stream(self, dataset: Any) -> Any:
        total, first = AnswerCounts(), next(iter(dataset))
        for row in islice(iter(dataset), _FIRST_ROWS):
            total += self._labels.label_row(*(row.get(name) for name in _ROW_COLUMNS))[1]
            if total.labels and total.without_question < total.documents:
                break
        self._check(total, first, "first ")
        labelled = dataset.map(_StreamLabels(self._labels, self._describe), batched=True)
        return labelled.filter(_has_label).remove_columns([COUNTS])

    def _check(self, total: AnswerCounts, first: Mapping[str, Any], which: str) -> None:
        """Refuse to train on nothing."""
        for part, marker, missing in (
            ("response_part", self._answer, total.without_answer),
            ("instruction_part", self._question, total.without_question),
        ):
            if missing == total.documents:
                excerpt = printable(self._tokenizer.decode(first["input_ids"][:_EXCERPT])[:_EXCERPT])
                raise InputError(
                    f"{part} {marker!r} is in none of the {which}{total.documents:,} documents of "
                    f"{self._name}; give what stands before a turn in them, the first begins {excerpt!r}"
                )
        if not total.labels:
            raise InputError(
                f"{self._name} has no label left in the {which}{total.documents:,} documents: nothing stands "
                f"behind response_part {self._answer!r}, or it was cut off or masked before; raise "
                "max_length, or correct the parts"
            )

    def _describe(self, total: AnswerCounts) -> tuple[str, str]:
        return self._name, (
            f"of {total.documents:,} documents {total.without_answer:,} lack response_part and "
            f"{total.without_question:,} lack instruction_part"
        )


def _has_label(row: Mapping[str, Any]) -> bool:
    return AnswerCounts(*row[COUNTS]).labels > 0


class _StreamLabels:
    """Label the batches of a stream, and warn at 1, 10, 100, ... documents without a marker.

    Raises:
        InputError: `_FIRST_ROWS` documents in a row have no label.
    """

    def __init__(self, labels: AnswerLabels, describe: Callable[[AnswerCounts], tuple[str, str]]):
        self._labels, self._describe = labels, describe
        self._total, self._warned, self._n_unlabelled = AnswerCounts(), 0, 0

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        columns = self._labels(batch)
        for counts in (AnswerCounts(*row) for row in columns[COUNTS]):
            self._total += counts
            self._n_unlabelled = 0 if counts.labels else self._n_unlabelled + counts.documents
        missing = max(self._total.without_answer, self._total.without_question)
        name, text = self._describe(self._total)
        if missing >= 10 * self._warned and missing:
            self._warned = missing
            logger.warning("%s: so far, %s", name, text)
        if self._n_unlabelled >= _FIRST_ROWS:
            problem = f"{name} has {self._n_unlabelled:,} documents in a row without an answer"
            raise InputError(f"{problem}; correct the data")
        return columns


def _check_collator(trainer: Any, dataset: Any) -> None:
    """Refuse a collator that replaces the labels of the rows."""
    collate = getattr(trainer, "data_collator", None)
    if collate is None:
        return
    row = next(iter(dataset))
    row = {name: row[name] for name in (*_ROW_COLUMNS, "attention_mask") if name in row}
    try:
        batch = collate([row])
    except Exception:  # it needs other columns
        return
    n_labels = sum(label != IGNORE_INDEX for label in row["labels"])
    labels = batch.get("labels")
    if labels is None or int((labels != IGNORE_INDEX).sum()) > n_labels:
        problem = f"data_collator is a {type(collate).__name__}, which does not keep the labels of rows"
        raise InputError(f"{problem}; leave it out, or give transformers' DataCollatorForSeq2Seq(tokenizer)")


def find_relabel(
    tokenizer: Any, question: str | None = None, answer: str | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """Return a function from ids and labels `[n]` to labels `[n]` on answers only, for single rows.

    Args:
        question, answer: the chat template's text before each. None if the template marks answers itself, or
            is known by name.

    Returns:
        None if the chat template marks answers itself.

    Raises:
        InputError: the markers are not known.
    """
    if question is None and answer is None:
        if marks_answers(tokenizer.get_chat_template()):
            return None
        question, answer = get_parts(tokenizer) or (None, None)
    if not question or not answer:
        raise InputError(
            f"train_on_responses_only is set, instruction_part is {question!r} and response_part {answer!r}; "
            "give what the chat template puts before a question and before an answer"
        )
    labels = AnswerLabels(question, answer, tokenizer)
    return lambda ids, old: labels.label_row(ids.tolist(), old.tolist(), None)[0].astype(np.int32)
