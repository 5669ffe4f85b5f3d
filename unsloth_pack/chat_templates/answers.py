"""`train_on_responses_only`: limit the loss to answers, which are found among the token ids.

A tokenizer may merge the ends of a marker with the text around it. So markers are found in the decoded text,
whose bytes tell the tokens.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from unsloth_pack.chat_templates.templates import get_parts
from unsloth_pack.data.encoding import IGNORE_INDEX, marks_answers
from unsloth_pack.errors import InputError, printable

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback
_PREFIX = "a"  # some decoders strip a leading space
# A column of four counts: documents, those without a question or without an answer, and tokens in the loss
COUNTS = "counts of answers"
_FIRST_ROWS = 1000  # of a stream, which must contain an answer
_EXCERPT = 160  # characters of a document in an error
_ROW_COLUMNS = ("input_ids", "labels", "seq_lengths")
Batch = Mapping[str, Sequence[object]]
Span = tuple[int, int]
Row = Mapping[str, Any]

logger = logging.getLogger("unsloth_pack")


class TokenTexts:
    """Decode token ids one by one, so that a place in the text tells the token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._byte_of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
        (self._prefix, *_) = tokenizer(_PREFIX, add_special_tokens=False)["input_ids"]
        self._n_prefix = len(self._decode([self._prefix]))
        self._texts: dict[int, bytes] = {}

    def find(self, ids: np.ndarray, *markers: str) -> list[list[Span]]:
        """List of every marker its occurrences: their first tokens, and the first tokens after them.

        A token with the end of the marker and further text belongs to that text. A token with its beginning
        belongs to the marker.
        """
        parts = [self._decode_token(token) for token in ids.tolist()]  # bytes: a letter may span tokens
        text, ends = b"".join(parts), np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        spans = []
        for marker in markers:
            places = [match.span() for match in re.finditer(re.escape(marker.encode()), text)]
            firsts, lasts = np.searchsorted(ends, np.asarray(places, np.int64).reshape(-1, 2).T, "right")
            spans.append(list(zip(firsts.tolist(), lasts.tolist(), strict=True)))
        return spans

    def _decode_token(self, token: int) -> bytes:
        if token not in self._texts:
            text = self._decode([self._prefix, token])[self._n_prefix :]
            self._texts[token] = self._decode_bytes(token) if "\ufffd" in text else text.encode()
        return self._texts[token]

    def _decode_bytes(self, token: int) -> bytes:
        """Return the bytes of a part of a letter, in a vocabulary of bytes or with byte fallback."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return bytes(self._byte_of_letter[letter] for letter in piece if letter in self._byte_of_letter)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class AnswerLabels:
    """Label documents: the ids after the marker `answer`, up to the marker `question`, and -100 elsewhere."""

    def __init__(self, question: str, answer: str, tokenizer: PreTrainedTokenizerBase):
        self.question, self.answer = question, answer
        self._texts = TokenTexts(tokenizer)

    def __call__(self, batch: Batch) -> dict[str, list[Any]]:
        """Return the columns `labels` and `COUNTS` of a batch. Its labels of -100 stay -100."""
        nones = [None] * len(batch["input_ids"])
        columns = [batch.get(name) or nones for name in _ROW_COLUMNS]
        rows = [self.label_row(*row) for row in zip(*columns, strict=True)]
        return {"labels": [labels for labels, _ in rows], COUNTS: [counts.tolist() for _, counts in rows]}

    def label_row(
        self, input_ids: Sequence[int], old_labels: Sequence[int] | None, seq_lengths: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels `[tokens]` of one row, and its counts."""
        ids = np.asarray(input_ids, np.int64)
        is_packed = np.ndim(seq_lengths) == 1  # a column of plain numbers is not from packing
        ends = np.cumsum(seq_lengths if is_packed else [len(ids)])
        labels, counts = np.full(len(ids), IGNORE_INDEX), np.zeros(4, np.int64)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            document = ids[begin:end]
            questions, answers = self._texts.find(document, self.question, self.answer)
            for first, last in _find_answers(questions, answers, len(document)):
                labels[begin + first : begin + last] = document[first:last]
            if old_labels is not None:
                labels[begin:end][np.asarray(old_labels[begin:end]) == IGNORE_INDEX] = IGNORE_INDEX
            learned = int((labels[begin + 1 : end] != IGNORE_INDEX).sum())
            counts += [1, not questions, not answers, learned]
        return labels, counts


def _find_answers(questions: list[Span], answers: list[Span], n_tokens: int) -> list[Span]:
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
    Rows without a label are dropped, and a warning counts the documents without a marker, in a stream those
    of its first rows.

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
    labels = AnswerLabels(*_markers(instruction_part, response_part, tokenizer), tokenizer)
    main_process_first = getattr(getattr(trainer, "args", None), "main_process_first", nullcontext)
    labelled: dict[str, Any] = {}
    with main_process_first():
        for name in ("train_dataset", "eval_dataset"):
            data = getattr(trainer, name, None)
            parts = data if isinstance(data, Mapping) else {} if data is None else {"": data}
            new = {
                key: _label(part, f"{name} {key}".strip(), labels, tokenizer, num_proc)
                for key, part in parts.items()
            }
            labelled[name] = new if isinstance(data, Mapping) else new.get("")
    _check_collator(trainer, labelled["train_dataset"])
    for name, data in labelled.items():
        if data is not None:
            setattr(trainer, name, data)
    return trainer


def _markers(question: object, answer: object, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    known = get_parts(tokenizer) or (None, None)
    question = known[0] if question is None else question
    answer = known[1] if answer is None else answer
    for name, text in (("instruction_part", question), ("response_part", answer)):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name} is {text!r}; give what the chat template puts before a turn")
    if question == answer:
        raise InputError(f"instruction_part and response_part are both {question!r}; they have to differ")
    return str(question), str(answer)


def _label(
    dataset: Any, name: str, labels: AnswerLabels, tokenizer: PreTrainedTokenizerBase, num_proc: int | None
) -> "Dataset | IterableDataset":
    """Label one data set; `name` is for errors."""
    row = next(iter(dataset), None)
    if row is None or "input_ids" not in row:
        problem = "has no rows" if row is None else f"has the columns {', '.join(row)}"
        raise InputError(f"{name} {problem}; give the trainer rows that it turns into input_ids")
    is_stream = not hasattr(dataset, "__len__")
    if is_stream:
        labelled = dataset.map(labels, batched=True)
        batches = [[row[COUNTS]] for row in islice(labelled, _FIRST_ROWS)]
    else:
        labelled = dataset.map(labels, batched=True, num_proc=num_proc, desc="Finding answers")
        numbers = labelled.select_columns([COUNTS]).with_format("numpy")
        batches = [batch[COUNTS] for batch in numbers.iter(batch_size=1000)]
    counts = np.concatenate([np.asarray(batch) for batch in batches])
    documents, no_question, no_answer, n_labels = counts.sum(0).tolist()
    which = "first " if is_stream else ""
    for part, marker, missing in (
        ("response_part", labels.answer, no_answer),
        ("instruction_part", labels.question, no_question),
    ):
        if missing == documents:
            excerpt = printable(str(tokenizer.decode(row["input_ids"][:_EXCERPT]))[:_EXCERPT])
            raise InputError(
                f"{part} {marker!r} is in none of the {which}{documents:,} documents of {name}; give what "
                f"stands before a turn in them, the first begins {excerpt!r}"
            )
    if not n_labels:
        raise InputError(
            f"{name} has no label left in the {which}{documents:,} documents: nothing stands behind "
            f"response_part {labels.answer!r}, or it was cut off or masked before; raise max_length, or "
            "correct the parts"
        )
    learned = np.flatnonzero(counts[:, 3])
    dropped = len(counts) - len(learned)
    if dropped or no_question or no_answer:
        missing = f"{no_answer:,} lack response_part and {no_question:,} lack instruction_part"
        text = "%s: of %s%d documents %s; %d rows without a label are dropped"
        logger.warning(text, name, which, documents, missing, dropped)
    if is_stream:
        return labelled.filter(_has_label).remove_columns([COUNTS])
    return (labelled.select(learned) if dropped else labelled).remove_columns([COUNTS])


def _has_label(row: Row) -> bool:
    return bool(row[COUNTS][3])


def _check_collator(trainer: object, dataset: Any) -> None:
    """Refuse a collator that replaces the labels of the rows."""
    collate = getattr(trainer, "data_collator", None)
    if collate is None or isinstance(dataset, Mapping):
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
    tokenizer: PreTrainedTokenizerBase, question: str | None = None, answer: str | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """Return a function from ids and labels `[n]` to labels `[n]` on answers only, for single rows.

    `question` and `answer` are the template's text before each; None if it is known by name. The function is
    None if the template marks answers itself.
    """
    if question is None and answer is None and marks_answers(tokenizer.get_chat_template()):
        return None
    return partial(_relabel, AnswerLabels(*_markers(question, answer, tokenizer), tokenizer))


def _relabel(labels: AnswerLabels, ids: np.ndarray, old: np.ndarray) -> np.ndarray:
    return labels.label_row(ids.tolist(), old.tolist(), None)[0].astype(np.int32)
