"""Several data sets as one: which of their documents a pass over the data holds, and in which order.

Documents that are held out for the evaluation are taken out first, so that no draw brings them back.

concatenate        one data set after the other. A weight says how often its documents come: 2 is twice, and
                   0.5 is a random half of them.
interleave_under   the next document comes from a data set drawn by the weights, until the first one has none
                   left. Some documents of the others are left over.
interleave_over    the same, until each data set has been used up; those that are used up begin again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.cache import scan
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.rows import IMAGES, update_with_images
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.data.tokenize import Documents
from unsloth_pack.errors import InputError

# Hold documents out of the training, to evaluate on them.
#
# Documents with equal tokens and images are on the same side, wherever they stand. The choice
# depends on the documents and the seed alone: not on their order, nor on how many processes read them.

if TYPE_CHECKING:
    import datasets

_ROWS_AT_ONCE = 1000  # documents whose tokens are read at a time
_HASH_BYTES = 16


def held_out(documents: datasets.Dataset, fraction: float, seed: int) -> np.ndarray:
    """`[documents]` bool: about this share of them, at least one and never all.

    Args:
        documents: `input_ids`.
        fraction: above 0 and below 1.

    Raises:
        InputError: all documents are equal, so that none could be held out.
    """
    hashes = _hashes(documents, seed)
    _, group_of, sizes = np.unique(hashes, return_inverse=True, return_counts=True)  # in a random order
    if len(sizes) < 2:
        raise InputError(
            f"eval_fraction is {fraction:g}, and all {len(hashes):,} documents hold the same tokens, so that "
            "none can be held out; give more data, or --eval_dataset",
            about="eval_fraction",
        )
    most = fraction * len(hashes)
    is_chosen = np.zeros(len(sizes), bool)
    chosen = 0
    for group, size in enumerate(sizes.tolist()):
        if chosen + size <= most:
            is_chosen[group] = True
            chosen += size
    if not chosen:
        is_chosen[np.argmin(sizes)] = True
    return is_chosen[group_of]


def _hashes(documents: datasets.Dataset, seed: int) -> np.ndarray:
    """`[documents]`: hashes of their tokens and images, whose order is another with each seed."""
    key = seed.to_bytes(8, "little")
    found = bytearray()
    columns = [name for name in ("input_ids", IMAGES) if name in documents.column_names]
    for table in scan(documents, columns, _ROWS_AT_ONCE):
        lists = table["input_ids"].combine_chunks()
        ids = lists.flatten().to_numpy()
        ends = np.cumsum(lists.value_lengths().to_numpy())
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            digest = hashlib.blake2b(ids[begin:end].tobytes(), digest_size=_HASH_BYTES, key=key)
            if IMAGES in columns:
                update_with_images(digest, table[IMAGES].slice(number, 1))
            found += digest.digest()
    return np.frombuffer(bytes(found), f"S{_HASH_BYTES}")


MIXTURES = {
    "concatenate": None,
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
}  # and the name that `datasets` has for where they end
_BATCH = 1000  # documents whose labels are read at a time


@dataclass(frozen=True)
class Part:
    """What one data set is to a run.

    Args:
        name: of the data set.
        weight: in the mixture.
        unused_columns: columns that nothing is made of.
        documents: that it has, without those in which no label counts; None where it streams.
        held_out: those of them that are evaluated on.
        trained_documents, trained_tokens: in a pass over the mixture, repeats included.
    """

    name: str
    weight: float
    unused_columns: tuple[str, ...]
    documents: int | None = None
    held_out: int = 0
    trained_documents: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Mixture:
    """What is trained on, what is held out of it to be evaluated on, and where they come from."""

    train: Documents
    held_out: Documents | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Source:
    """A data set that takes part in a mixture, and the option that names it."""

    name: str
    weight: float
    documents: Documents
    option: str = ""


def mix(
    sources: Sequence[Source],
    how: str = "concatenate",
    *,
    seed: int,
    eval_fraction: float | None = None,
    most: int | None = None,
) -> Mixture:
    """The documents of a pass over one or several data sets.

    Args:
        how: one of `MIXTURES`.
        seed: of what is drawn, and of what is held out.
        eval_fraction: the share of all documents that is held out.
        most: documents of the pass, its first ones; None for all.

    Raises:
        InputError: a data set has no document left to train on, or nothing can be held out.
    """
    import datasets

    together = sources[0].documents.rows
    is_plain = len(sources) == 1 and sources[0].weight == 1 and eval_fraction is None
    if is_plain and (most is None or most >= len(together)):
        return _single(sources[0])
    if len(sources) > 1:
        together = datasets.concatenate_datasets([source.documents.rows for source in sources])
    n_documents = [len(source.documents.rows) for source in sources]
    ends = np.cumsum(n_documents)
    starts = ends - n_documents
    is_held = np.zeros(len(together), bool)
    if eval_fraction is not None:
        is_held = held_out(together, eval_fraction, seed)
    left = [begin + np.flatnonzero(~is_held[begin:end]) for begin, end in zip(starts, ends, strict=True)]
    for source, numbers in zip(sources, left, strict=True):
        if not len(numbers):
            raise InputError(
                f"{source.name}: all of its {len(source.documents.rows):,} documents are held out by "
                f"eval_fraction {eval_fraction:g}; lower it, or leave out the data set",
                about=(source.option, "eval_fraction"),
            )
    order = _order(sources, left, how, seed)[:most]
    lengths = _Lengths.of(together)
    times = np.bincount(order, minlength=len(together))
    parts = tuple(
        Part(
            source.name,
            source.weight,
            source.documents.unused_columns,
            int(end - begin),
            int(is_held[begin:end].sum()),
            int(times[begin:end].sum()),
            int((times * lengths.tokens)[begin:end].sum()),
        )
        for source, begin, end in zip(sources, starts, ends, strict=True)
    )
    whole = _joined([source.documents for source in sources])
    train = replace(_selected(together, whole, order), ledger=lengths.ledger(whole.ledger, times, is_held))
    evaluation = None
    if eval_fraction is not None:
        numbers = np.flatnonzero(is_held)
        evaluation = replace(_selected(together, whole, numbers), ledger=lengths.of_held_out(numbers))
    return Mixture(train, evaluation, parts)


def _single(source: Source) -> Mixture:
    """One data set as it is."""
    documents, ledger = len(source.documents.rows), source.documents.ledger
    tokens = ledger.tokens_read - ledger.tokens_truncated - ledger.tokens_dropped
    part = Part(source.name, 1.0, source.documents.unused_columns, documents, 0, documents, tokens)
    return Mixture(source.documents, None, (part,))


def _order(sources: Sequence[Source], left: Sequence[np.ndarray], how: str, seed: int) -> np.ndarray:
    """The numbers of the documents in the order of the mixture, as they come from those that are `left`."""
    ending = MIXTURES[how]
    if ending is None or len(sources) == 1:
        weighted = zip(sources, left, strict=True)
        return np.concatenate(
            [_times(source, some, [seed, number]) for number, (source, some) in enumerate(weighted)]
        )
    import datasets

    weights = np.array([source.weight for source in sources])
    numbered = [datasets.Dataset.from_dict({"number": some}) for some in left]
    drawn = datasets.interleave_datasets(
        numbered, (weights / weights.sum()).tolist(), seed, stopping_strategy=ending
    )
    return np.asarray(drawn.with_format("numpy")["number"][:], np.int64)


def _times(source: Source, numbers: np.ndarray, seed: list[int]) -> np.ndarray:
    """The documents as often as their weight says; of its fraction, a random part of them in their order."""
    whole, fraction = divmod(source.weight, 1)
    n_more = round(fraction * len(numbers))
    if not whole and not n_more:
        raise InputError(
            f"{source.name}: weight {source.weight:g} of {len(numbers):,} documents leaves none; raise it",
            about=f"{source.option}.weight",
        )
    more = np.random.default_rng(seed).permutation(len(numbers))[:n_more]
    return np.concatenate([np.tile(numbers, int(whole)), numbers[np.sort(more)]])


def _selected(together: datasets.Dataset, whole: Documents, order: np.ndarray) -> Documents:
    if np.array_equal(order, np.arange(len(together))):
        return replace(whole, rows=together)
    key = json.dumps([whole.fingerprint, hashlib.sha256(order.astype(np.int64).tobytes()).hexdigest()])
    return replace(whole, rows=together.select(order), fingerprint=hashlib.sha256(key.encode()).hexdigest())


def _joined(documents: Sequence[Documents]) -> Documents:
    """What is known of all documents together; the rows are those of the first."""
    if len(documents) == 1:
        return documents[0]
    key = json.dumps([each.fingerprint for each in documents])
    return replace(
        documents[0],
        ledger=TokenLedger.of_all([each.ledger for each in documents]),
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        least_id=min(each.least_id for each in documents),
        last_id=max(each.last_id for each in documents),
        has_files=any(each.has_files for each in documents),
    )


@dataclass(frozen=True)
class _Lengths:
    """`[documents]` each: tokens, those without loss, and 1 where the first token would count."""

    tokens: np.ndarray
    masked: np.ndarray
    at_begin: np.ndarray

    @classmethod
    def of(cls, documents: datasets.Dataset) -> _Lengths:
        found = []
        for table in scan(documents, ["labels"], _BATCH):
            lists = table["labels"].combine_chunks()
            tokens = lists.value_lengths().to_numpy().astype(np.int64)
            is_masked = lists.flatten().to_numpy() == IGNORE_INDEX
            starts = np.cumsum(tokens) - tokens  # no document is empty: in each of them a label counts
            masked = np.add.reduceat(is_masked, starts, dtype=np.int64)
            found.append((tokens, masked, ~is_masked[starts]))
        return cls(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def ledger(self, read: TokenLedger, times: np.ndarray, is_held: np.ndarray) -> TokenLedger:
        """The ledger of documents that train so many times each.

        Args:
            read: the ledger of all that was read.
            is_held: the documents that are held out.
        """
        is_left = (times == 0) & ~is_held
        more = np.maximum(times - 1, 0)
        masked, at_begin = int((times * self.masked).sum()), int((times * self.at_begin).sum())
        return replace(
            read,
            tokens_masked_by_template=masked,
            tokens_masked_at_boundaries=at_begin,
            tokens_counted=int((times * self.tokens).sum()) - masked - at_begin,
            rows_held_out=int(is_held.sum()),
            tokens_held_out=int(self.tokens[is_held].sum()),
            rows_not_drawn=int(is_left.sum()),
            tokens_not_drawn=int(self.tokens[is_left].sum()),
            rows_repeated=int(more.sum()),
            tokens_repeated=int((more * self.tokens).sum()),
        )

    def of_held_out(self, numbers: np.ndarray) -> TokenLedger:
        """The ledger of documents that are evaluated on, as they were cut when they were read."""
        tokens = self.tokens[numbers]
        masked, at_begin = int(self.masked[numbers].sum()), int(self.at_begin[numbers].sum())
        return TokenLedger(
            rows_read=len(numbers),
            tokens_read=int(tokens.sum()),
            rows_truncated=0,
            tokens_truncated=0,
            rows_fully_masked=0,
            tokens_dropped=0,
            tokens_masked_by_template=masked,
            tokens_masked_at_boundaries=at_begin,
            tokens_counted=int(tokens.sum()) - masked - at_begin,
            prompts_rerendered=0,
            longest=int(tokens.max()),
            p99=int(np.quantile(tokens, 0.99, method="higher")),
        )
