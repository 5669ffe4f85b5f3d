"""`train_on_responses_only`: the loss on answers alone, from the token ids of a trainer's data sets."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

from unsloth_pack.chat_templates.answer_labels import COUNTS, AnswerCounts, AnswerLabels
from unsloth_pack.chat_templates.by_name import parts_of
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.errors import InputError, printable

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
