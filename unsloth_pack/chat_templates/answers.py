"""`train_on_responses_only`: the loss on answers alone, from the token ids of a trainer's data sets."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

import numpy as np

from unsloth_pack.chat_templates.templates import parts_of
from unsloth_pack.data.encoding import IGNORE_INDEX, marks_answers
from unsloth_pack.errors import InputError, printable

# Where a text stands among token ids, although a tokenizer may join its ends with what is beside it.

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback
_BESIDE = "a"  # some decoders strip a space that nothing stands before


@dataclass(frozen=True, eq=False)
class DocumentText:
    """The text of one document, and where each token of it ends.

    Args:
        text: in UTF-8: a letter may be spread over several tokens.
        ends: `[tokens]` int64, in bytes of `text`.
    """

    text: bytes
    ends: np.ndarray

    def spans(self, marker: str) -> list[tuple[int, int]]:
        """The first token of a marker, and the first behind it, wherever it stands.

        A token that holds the end of the marker and text behind it belongs to that text. One that holds its
        begin belongs to the marker.
        """
        places = [match.span() for match in re.finditer(re.escape(marker.encode()), self.text)]
        firsts, lasts = np.searchsorted(self.ends, np.asarray(places, np.int64).reshape(-1, 2).T, "right")
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


class TokenTexts:
    """The text of token ids, one by one, so that a place in the text tells the token."""

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._byte_of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
        (self._before, *_) = tokenizer(_BESIDE, add_special_tokens=False)["input_ids"]
        self._n_before = len(self._decoded([self._before]))
        self._known: dict[int, bytes] = {}

    def __call__(self, ids: np.ndarray) -> DocumentText:
        """The text of a document of `[tokens]` ids."""
        parts = [self._text_of(token) for token in ids.tolist()]
        return DocumentText(b"".join(parts), np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))))

    def _text_of(self, token: int) -> bytes:
        if token not in self._known:
            text = self._decoded([self._before, token])[self._n_before :]
            self._known[token] = self._part_of_letter(token) if "\ufffd" in text else text.encode()
        return self._known[token]

    def _part_of_letter(self, token: int) -> bytes:
        """The bytes of a token that is no text by itself, in a vocabulary with byte fallback or of bytes."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return bytes(self._byte_of_letter[letter] for letter in piece if letter in self._byte_of_letter)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# Labels on answers alone, for a batch of tokenised rows, packed or not.

COUNTS = "counts of answers"  # a column of `AnswerCounts`, until they are summed


@dataclass(frozen=True)
class AnswerCounts:
    """What was found in some documents.

    Args:
        without_question, without_answer: documents in which a marker is missing.
        labels: tokens that count in the loss.
    """

    documents: int = 0
    without_question: int = 0
    without_answer: int = 0
    labels: int = 0

    def __add__(self, other: "AnswerCounts") -> "AnswerCounts":
        return AnswerCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class AnswerLabels:
    """Labels of documents: the ids behind `response_part`, up to the next `instruction_part`, and -100.

    Args:
        question, answer: the markers. A marker itself carries no loss.
    """

    def __init__(self, question: str, answer: str, tokenizer: Any):
        self._question, self._answer = question, answer
        self._texts = TokenTexts(tokenizer)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The columns `labels` and `COUNTS` of a batch.

        Labels of the batch that are -100 stay so.

        Args:
            batch: `input_ids`, and perhaps `labels` and the `seq_lengths` of packed rows.
        """
        n_rows = len(batch["input_ids"])
        given = batch.get("labels") or [None] * n_rows
        lengths = batch.get("seq_lengths") or [None] * n_rows
        labels, counts = [], []
        for row in zip(batch["input_ids"], given, lengths, strict=True):
            of_row, counted = self.of_row(*row)
            labels.append(of_row)
            counts.append(list(astuple(counted)))
        return {"labels": labels, COUNTS: counts}

    def of_row(
        self, input_ids: Sequence[int], given: Sequence[int] | None, seq_lengths: Any
    ) -> tuple[np.ndarray, AnswerCounts]:
        """`[tokens]` labels of one row, and what was found in its documents."""
        ids = np.asarray(input_ids, np.int64)
        is_packed = np.ndim(seq_lengths) == 1  # or a column of numbers, which no packing has made
        ends = np.cumsum(seq_lengths if is_packed else [len(ids)])
        labels, counts = np.full(len(ids), IGNORE_INDEX), AnswerCounts()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            document = ids[begin:end]
            text = self._texts(document)
            questions, answers = text.spans(self._question), text.spans(self._answer)
            for first, last in _between(questions, answers, len(document)):
                labels[begin + first : begin + last] = document[first:last]
            if given is not None:
                labels[begin:end][np.asarray(given[begin:end]) == IGNORE_INDEX] = IGNORE_INDEX
            learned = int((labels[begin + 1 : end] != IGNORE_INDEX).sum())
            counts += AnswerCounts(1, not questions, not answers, learned)
        return labels, counts


def _between(
    questions: list[tuple[int, int]], answers: list[tuple[int, int]], n_tokens: int
) -> list[tuple[int, int]]:
    """Where each answer begins and ends: at the next marker of either kind, or with the document."""
    marks = sorted([*(begin for begin, _ in questions), *(begin for begin, _ in answers), n_tokens])
    return [(end, next(mark for mark in marks if mark >= end)) for _, end in answers]


_FIRST_ROWS = 1000  # of a stream, among which an answer has to be
_SHOWN = 160  # characters of a document that an error shows
_OF_ROWS = ("input_ids", "labels", "seq_lengths")

logger = logging.getLogger("unsloth_pack")


def train_on_responses_only(
    trainer: Any,
    instruction_part: str | None = None,
    response_part: str | None = None,
    tokenizer: Any = None,
    num_proc: int | None = None,
) -> Any:
    """The trainer, whose data sets now have labels on answers alone.

    An answer is what stands behind `response_part`, up to the next `instruction_part` or the end of its
    document. The markers are found among the token ids, in packed rows document by document. Labels that are
    -100 already stay so. Rows in which nothing is left to learn are dropped, and a line says how many
    documents lack a marker.

    ```python
    trainer = train_on_responses_only(
        trainer,
        instruction_part="<|im_start|>user\\n",
        response_part="<|im_start|>assistant\\n",
    )
    ```

    Args:
        trainer: TRL's `SFTTrainer`, or any with tokenised data sets: lists or streams, packed or not.
        instruction_part, response_part: what the chat template puts before a question and before an answer.
            They may be left out where `get_chat_template` gave the tokenizer its template by name.
        tokenizer: None for the trainer's.
        num_proc: processes that share out the rows of a data set that does not stream.

    Raises:
        InputError: a marker is in no document, or no label is left; rows without `input_ids`; a collator that
            makes labels of its own. The trainer is as before then.
    """
    tokenizer = tokenizer or getattr(trainer, "processing_class", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None or getattr(trainer, "train_dataset", None) is None:
        raise InputError("trainer has no tokenizer or no train_dataset; make it with both before this call")
    question, answer = _markers(instruction_part, response_part, tokenizer)
    first = getattr(getattr(trainer, "args", None), "main_process_first", nullcontext)
    with first():
        made = {
            (name, key): _Answers(" ".join([name, *filter(None, [key])]), question, answer, tokenizer).of(
                dataset, num_proc
            )
            for name in ("train_dataset", "eval_dataset")
            for key, dataset in _named(getattr(trainer, name, None))
        }
    _check_collator(trainer, made["train_dataset", ""])
    for (name, key), dataset in made.items():
        if key:
            setattr(trainer, name, {**getattr(trainer, name), key: dataset})
        else:
            setattr(trainer, name, dataset)
    return trainer


def _markers(question: Any, answer: Any, tokenizer: Any) -> tuple[str, str]:
    known = parts_of(tokenizer)
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


def _named(given: Any) -> list[tuple[str, Any]]:
    """Data sets with the keys of their dict, "" for one alone."""
    if given is None:
        return []
    return list(given.items()) if isinstance(given, Mapping) else [("", given)]


class _Answers:
    """Gives one data set its labels.

    Args:
        name: of the data set, for errors.
    """

    def __init__(self, name: str, question: str, answer: str, tokenizer: Any):
        self._name, self._tokenizer = name, tokenizer
        self._question, self._answer = question, answer
        self._labels = AnswerLabels(question, answer, tokenizer)

    def of(self, dataset: Any, num_proc: int | None) -> Any:
        row = next(iter(dataset), None)
        if row is None or "input_ids" not in row:
            seen = "has no rows" if row is None else f"has the columns {', '.join(row)}"
            raise InputError(f"{self._name} {seen}; give the trainer rows that it turns into input_ids")
        if hasattr(dataset, "__len__"):
            return self._of_rows(dataset, num_proc)
        return self._of_stream(dataset)

    def _of_rows(self, dataset: Any, num_proc: int | None) -> Any:
        labelled = dataset.map(self._labels, batched=True, num_proc=num_proc, desc="Finding answers")
        of_rows = [
            AnswerCounts(*counts)
            for batch in labelled.select_columns([COUNTS]).with_format(None).iter(batch_size=1000)
            for counts in batch[COUNTS]
        ]
        total = sum(of_rows, AnswerCounts())
        self._check(total, dataset[0], "")
        learned = [place for place, counts in enumerate(of_rows) if counts.labels]
        dropped = len(of_rows) - len(learned)
        if dropped or total.without_question or total.without_answer:
            logger.warning("%s: %s; %d rows without a label are dropped", *self._told(total), dropped)
        labelled = labelled.remove_columns([COUNTS])
        return labelled.select(learned) if dropped else labelled

    def _of_stream(self, dataset: Any) -> Any:
        total, first = AnswerCounts(), next(iter(dataset))
        for row in islice(iter(dataset), _FIRST_ROWS):
            total += self._labels.of_row(*(row.get(name) for name in _OF_ROWS))[1]
            if total.labels and total.without_question < total.documents:
                break
        self._check(total, first, "first ")
        labelled = dataset.map(_Watched(self._labels, self._told), batched=True)
        return labelled.filter(_has_label).remove_columns([COUNTS])

    def _check(self, found: AnswerCounts, first: Mapping[str, Any], which: str) -> None:
        """Refuse to train on nothing."""
        for part, marker, missing in (
            ("response_part", self._answer, found.without_answer),
            ("instruction_part", self._question, found.without_question),
        ):
            if missing == found.documents:
                begins = printable(self._tokenizer.decode(first["input_ids"][:_SHOWN])[:_SHOWN])
                raise InputError(
                    f"{part} {marker!r} is in none of the {which}{found.documents:,} documents of "
                    f"{self._name}; give what stands before a turn in them, the first begins {begins!r}"
                )
        if not found.labels:
            raise InputError(
                f"{self._name} has no label left in the {which}{found.documents:,} documents: nothing stands "
                f"behind response_part {self._answer!r}, or it was cut off or masked before; raise "
                "max_length, or correct the parts"
            )

    def _told(self, found: AnswerCounts) -> tuple[str, str]:
        return self._name, (
            f"of {found.documents:,} documents {found.without_answer:,} lack response_part and "
            f"{found.without_question:,} lack instruction_part"
        )


def _has_label(row: Mapping[str, Any]) -> bool:
    return AnswerCounts(*row[COUNTS]).labels > 0


class _Watched:
    """Labels the batches of a stream, and says how many documents lack a marker: at 1, 10, 100, ... of them.

    Raises:
        InputError: no label is left in so many documents one after another as a stream may begin without.
    """

    def __init__(self, labels: AnswerLabels, told: Any):
        self._labels, self._told = labels, told
        self._total, self._said, self._in_vain = AnswerCounts(), 0, 0

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        made = self._labels(batch)
        for counts in (AnswerCounts(*row) for row in made[COUNTS]):
            self._total += counts
            self._in_vain = 0 if counts.labels else self._in_vain + counts.documents
        missing = max(self._total.without_answer, self._total.without_question)
        if missing >= 10 * self._said and missing:
            self._said = missing
            logger.warning("%s: so far, %s", *self._told(self._total))
        if self._in_vain >= _FIRST_ROWS:
            name, _ = self._told(self._total)
            raise InputError(
                f"{name} has {self._in_vain:,} documents in a row without an answer; correct the data"
            )
        return made


def _check_collator(trainer: Any, dataset: Any) -> None:
    """Refuse a collator that gives the model other labels than those of the rows."""
    collate = getattr(trainer, "data_collator", None)
    if collate is None:
        return
    row = next(iter(dataset))
    row = {name: row[name] for name in (*_OF_ROWS, "attention_mask") if name in row}
    try:
        batch = collate([row])
    except Exception:  # it needs columns that are its own affair
        return
    wanted = sum(label != IGNORE_INDEX for label in row["labels"])
    labels = batch.get("labels")
    if labels is None or int((labels != IGNORE_INDEX).sum()) > wanted:
        raise InputError(
            f"data_collator is a {type(collate).__name__}, which does not keep the labels of rows; leave it "
            "out, or give transformers' DataCollatorForSeq2Seq(tokenizer)"
        )


# Labels on answers alone, found by the markers around them, for rows that are encoded one at a time.


def answers_of(
    tokenizer: Any, question: str | None = None, answer: str | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """What makes labels `[n]` of ids and labels `[n]`: those on what stands behind `answer` stay.

    Args:
        question, answer: what the chat template puts before each. None where it marks answers itself, or is
            one that is known.

    Returns:
        None where the chat template marks answers itself.

    Raises:
        InputError: the markers are not known.
    """
    if question is None and answer is None:
        if marks_answers(tokenizer.get_chat_template()):
            return None
        question, answer = parts_of(tokenizer) or (None, None)
    if not question or not answer:
        raise InputError(
            f"train_on_responses_only is set, instruction_part is {question!r} and response_part {answer!r}; "
            "give what the chat template puts before a question and before an answer"
        )
    labels = AnswerLabels(question, answer, tokenizer)
    return lambda ids, given: labels.of_row(ids.tolist(), given.tolist(), None)[0].astype(np.int32)
