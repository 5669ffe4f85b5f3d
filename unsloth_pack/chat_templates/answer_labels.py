"""Labels on answers alone, for a batch of tokenised rows, packed or not."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from unsloth_pack.chat_templates.markers import TokenTexts
from unsloth_pack.data.encoding import IGNORE_INDEX

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
