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
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.cache import scan
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.files import SUFFIXES
from unsloth_pack.data.rows import IMAGES, update_with_images
from unsloth_pack.data.streaming import Place, RawBlock, RowSource, endless, no_rows
from unsloth_pack.data.text_files import plain_name
from unsloth_pack.data.token_counts import SpanCounts, TokenLedger
from unsloth_pack.data.tokenize import Documents
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

MIXTURES = {
    "concatenate": None,
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
}  # and the name that `datasets` has for where they end
_BATCH = 1000  # documents that are read at a time
_HASH_BYTES = 16


@dataclass(frozen=True)
class Part:
    """What one data set is to a run."""

    name: str
    weight: float
    unused_columns: tuple[str, ...]  # that nothing is made of
    documents: int | None = None  # without those in which no label counts; None where it streams
    held_out: int = 0  # documents that are evaluated on
    trained_documents: int = 0  # in a pass over the mixture, repeats included
    trained_tokens: int = 0


@dataclass(frozen=True)
class Mixture:
    """What is trained on, what is held out of it to be evaluated on, and where they come from."""

    train: Documents
    held_out: Documents | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Source:
    """A data set that takes part in a mixture."""

    name: str
    weight: float
    documents: Documents


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Name data sets in logs: `math` for `data/math.jsonl`, with as much of the path as tells them apart."""
    paths = [plain_name(Path(name)) for name in names]
    parts = [(path.with_suffix("") if path.suffix in SUFFIXES else path).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        short = [re.sub(r"[^\w.-]+", "_", "_".join(each[-depth:])).strip("_.") for each in parts]
        if len({*short}) == len(short):
            return tuple(short)
    return tuple(f"{name}-{number}" for number, name in enumerate(short, 1))


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
    """
    import datasets

    documents = [source.documents for source in sources]
    together = documents[0].rows
    is_plain = len(sources) == 1 and sources[0].weight == 1 and eval_fraction is None
    if is_plain and (most is None or most >= len(together)):
        n, ledger = len(together), documents[0].ledger
        tokens = ledger.tokens_read - ledger.tokens_truncated - ledger.tokens_dropped
        part = Part(sources[0].name, 1.0, documents[0].unused_columns, n, 0, n, tokens)
        return Mixture(documents[0], None, (part,))
    if len(sources) > 1:
        together = datasets.concatenate_datasets([each.rows for each in documents])
    ends = np.cumsum([len(each.rows) for each in documents]).tolist()
    bounds = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    is_held = np.zeros(len(together), bool)
    if eval_fraction is not None:
        is_held = held_out(together, eval_fraction, seed)
    left = [bound.start + np.flatnonzero(~is_held[bound]) for bound in bounds]
    for source, numbers in zip(sources, left, strict=True):
        if not len(numbers):
            raise InputError(
                f"{source.name}: all of its {len(source.documents.rows):,} documents are held out by "
                f"eval_fraction {eval_fraction:g}; lower it, or leave out the data set"
            )
    order = _order(sources, left, how, seed)[:most]
    lengths = _Lengths.of(together)
    times = np.bincount(order, minlength=len(together))
    parts = tuple(
        Part(
            source.name,
            source.weight,
            source.documents.unused_columns,
            len(source.documents.rows),
            int(is_held[bound].sum()),
            int(times[bound].sum()),
            int((times * lengths.tokens)[bound].sum()),
        )
        for source, bound in zip(sources, bounds, strict=True)
    )
    whole = _together(documents)
    train = replace(_selected(together, whole, order), ledger=lengths.ledger(whole.ledger, times, is_held))
    evaluation = None
    if eval_fraction is not None:
        of_held_out = lengths.of_held_out(is_held)
        evaluation = replace(_selected(together, whole, np.flatnonzero(is_held)), ledger=of_held_out)
    return Mixture(train, evaluation, parts)


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
            f"{source.name}: weight {source.weight:g} of {len(numbers):,} documents leaves none; raise it"
        )
    more = np.random.default_rng(seed).permutation(len(numbers))[:n_more]
    return np.concatenate([np.tile(numbers, int(whole)), numbers[np.sort(more)]])


def _selected(together: datasets.Dataset, whole: Documents, order: np.ndarray) -> Documents:
    if np.array_equal(order, np.arange(len(together))):
        return replace(whole, rows=together)
    digest = hashlib.sha256(order.astype(np.int64).tobytes()).hexdigest()
    return replace(whole, rows=together.select(order), fingerprint=_hash_of([whole.fingerprint, digest]))


def _together(documents: Sequence[Documents]) -> Documents:
    """What is known of all documents together; the rows are those of the first."""
    if len(documents) == 1:
        return documents[0]
    return replace(
        documents[0],
        ledger=TokenLedger.of_all([each.ledger for each in documents]),
        fingerprint=_hash_of([each.fingerprint for each in documents]),
        least_id=min(each.least_id for each in documents),
        last_id=max(each.last_id for each in documents),
        has_files=any(each.has_files for each in documents),
    )


def _hash_of(fingerprints: list[str]) -> str:
    return hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()


@dataclass(frozen=True)
class _Lengths:
    """`[documents]` each: tokens, those without loss, and 1 where the first token would count."""

    tokens: np.ndarray
    masked: np.ndarray
    at_begin: np.ndarray

    @classmethod
    def of(cls, documents: datasets.Dataset) -> _Lengths:
        batches = []
        for table in scan(documents, ["labels"], _BATCH):
            lists = table["labels"].combine_chunks()
            tokens = lists.value_lengths().to_numpy().astype(np.int64)
            is_masked = lists.flatten().to_numpy() == IGNORE_INDEX
            starts = np.cumsum(tokens) - tokens  # no document is empty: in each of them a label counts
            masked = np.add.reduceat(is_masked, starts, dtype=np.int64)
            batches.append((tokens, masked, ~is_masked[starts]))
        return cls(*(np.concatenate(each) for each in zip(*batches, strict=True)))

    def ledger(self, read: TokenLedger, times: np.ndarray, is_held: np.ndarray) -> TokenLedger:
        """The ledger of documents that train so many times each; `read` is that of all that was read."""
        is_left = (times == 0) & ~is_held
        more = np.maximum(times - 1, 0)
        return replace(
            read,
            **self._in_loss(times),
            rows_held_out=int(is_held.sum()),
            tokens_held_out=int(self.tokens[is_held].sum()),
            rows_not_drawn=int(is_left.sum()),
            tokens_not_drawn=int(self.tokens[is_left].sum()),
            rows_repeated=int(more.sum()),
            tokens_repeated=int((more * self.tokens).sum()),
        )

    def of_held_out(self, is_held: np.ndarray) -> TokenLedger:
        """The ledger of documents that are evaluated on, as they were cut when they were read."""
        tokens = self.tokens[is_held]
        sums = Counter(rows_read=len(tokens), tokens_read=int(tokens.sum()), **self._in_loss(is_held))
        return SpanCounts(sums, Counter(tokens.tolist())).ledger

    def _in_loss(self, times: np.ndarray) -> dict[str, int]:
        """Whether the tokens of documents that come so many times each count in the loss."""
        masked, at_begin = int((times * self.masked).sum()), int((times * self.at_begin).sum())
        return {
            "tokens_masked_by_template": masked,
            "tokens_masked_at_boundaries": at_begin,
            "tokens_counted": int((times * self.tokens).sum()) - masked - at_begin,
        }


# Hold documents out of the training, to evaluate on them. Documents with equal tokens and images are on the
# same side, wherever they stand. The choice depends on the documents and the seed alone: not on their order,
# nor on how many processes read them.


def held_out(documents: datasets.Dataset, fraction: float, seed: int) -> np.ndarray:
    """`[documents]` bool: about this share of them, at least one and never all."""
    hashes = _hashes(documents, seed)
    _, group_of, sizes = np.unique(hashes, return_inverse=True, return_counts=True)  # in a random order
    if len(sizes) < 2:
        raise InputError(
            f"eval_fraction is {fraction:g}, and all {len(hashes):,} documents hold the same tokens, so that "
            "none can be held out; give more data, or --eval_dataset"
        )
    is_chosen, left = np.zeros(len(sizes), bool), fraction * len(hashes)
    for group, size in enumerate(sizes.tolist()):
        if size <= left:
            is_chosen[group], left = True, left - size
    if not is_chosen.any():
        is_chosen[np.argmin(sizes)] = True
    return is_chosen[group_of]


def _hashes(documents: datasets.Dataset, seed: int) -> np.ndarray:
    """`[documents]`: hashes of their tokens and images, whose order is another with each seed."""
    key = seed.to_bytes(8, "little")
    hashes = bytearray()
    columns = [name for name in ("input_ids", IMAGES) if name in documents.column_names]
    for table in scan(documents, columns, _BATCH):
        lists = table["input_ids"].combine_chunks()
        ids = lists.flatten().to_numpy()
        ends = np.cumsum(lists.value_lengths().to_numpy())
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            digest = hashlib.blake2b(ids[begin:end].tobytes(), digest_size=_HASH_BYTES, key=key)
            if IMAGES in columns:
                update_with_images(digest, table[IMAGES].slice(number, 1))
            hashes += digest.digest()
    return np.frombuffer(bytes(hashes), f"S{_HASH_BYTES}")


# The same of streams. A mixture that interleaves draws the sources of `_ROUND` rows at a time. The rows of a
# round that come from one source come together: a block holds rows of one source, and the documents that wait
# to be packed hold rows of all. Every round has random numbers of its own, from the seed, the pass and its
# number. So a place is this number, where each source stood when the round began, and how many of its rows
# are done.

_ROUND = 1000  # rows that are drawn together


class MixedRows:
    """The rows of several sources of a stream, mixed as `mix` does; `seed` is of the draws."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], how: str, seed: int):
        self.parts = tuple(sources)
        self._weights, self._ending, self._seed = tuple(weights), MIXTURES[how], seed
        self.name = ", ".join(source.name for source in sources)
        for source, weight in zip(sources, weights, strict=True):
            if self._ending is None and weight % 1:
                raise InputError(
                    f"{source.name}: weight {weight:g} is a share of documents that nobody has counted, as "
                    "the data streams; give a whole number, or --mixture interleave_under"
                )

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        return (self._concatenated if self._ending is None else self._interleaved)(place)

    def _concatenated(self, place: Place) -> Iterator[RawBlock]:
        order = [part for part, weight in enumerate(self._weights) for _ in range(int(weight))]
        state = place.state or {"number": 0, "place": Place().as_json()}
        inner, seen = Place(**state["place"]), place.seen
        for number in range(state["number"], len(order)):
            for block in self.parts[order[number]].one_pass(inner):
                inner = block.end
                stand = {"number": number, "place": inner.as_json()}
                yield _placed(block, order[number], place.turn, seen, stand)
                seen += block.n_rows
            if not inner.seen:
                raise no_rows(self.parts[order[number]])
            inner = Place()

    def _interleaved(self, place: Place) -> Iterator[RawBlock]:
        begin = {"place": Place().as_json(), "passed": 0, "turns": 0}
        state = place.state or {"round": 0, "done": 0, "stands": [begin] * len(self.parts)}
        number, done, seen = state["round"], state["done"], place.seen
        readers = [_Reader(*each) for each in zip(self.parts, state["stands"], strict=True)]
        ends_pass = any if self._ending == "first_exhausted" else all
        shares = np.array(self._weights) / sum(self._weights)
        is_over = False
        while not is_over:
            stands, rows = [reader.stand for reader in readers], 0
            drawn: list[list[tuple[RawBlock, int]]] = [[] for _ in readers]
            rng = np.random.default_rng([self._seed, place.turn, number])
            for part in rng.choice(len(shares), _ROUND, p=shares).tolist():
                drawn[part].append(readers[part].next())
                if is_over := ends_pass(reader.turns for reader in readers):
                    break
            for part, of_part in enumerate(drawn):
                for block in _joined(of_part):
                    rows += block.n_rows
                    if rows > done:
                        stand = {"round": number, "done": rows, "stands": stands}
                        yield _placed(block, part, place.turn, seen, stand)
                        seen += block.n_rows
            number, done = number + 1, 0


class _Reader:
    """The rows of a source, over and over.

    Args:
        stand: where it goes on, as JSON has it: the begin of a block, how many of its rows are done, and how
            often the source has been read to its end.
    """

    def __init__(self, source: RowSource, stand: dict[str, Any]):
        blocks = endless(source, Place(**stand["place"]))
        self._blocks = (block for block in blocks if block.n_rows or block.ends_pass)
        self._block, self._passed, self.turns = next(self._blocks), stand["passed"], stand["turns"]

    @property
    def stand(self) -> dict[str, Any]:
        return {"place": self._block.begin.as_json(), "passed": self._passed, "turns": self.turns}

    def next(self) -> tuple[RawBlock, int]:
        """The next row: its block, and its number there."""
        block, row = self._block, self._passed
        self._passed += 1
        # Whether another block follows decides whether the source is used up
        if self._passed == block.n_rows:
            self._block, self._passed = next(self._blocks), 0
            if self._block.ends_pass:
                self._block, self.turns = next(self._blocks), self.turns + 1
        return block, row


def _joined(rows: Sequence[tuple[RawBlock, int]]) -> Iterator[RawBlock]:
    """The rows that come from one block, and so follow one another, as one block."""
    for _, some in groupby(rows, lambda row: id(row[0])):
        (block, first), *others = some
        yield _rows_of(block, first, first + 1 + len(others))


def _rows_of(block: RawBlock, first: int, last: int) -> RawBlock:
    """The rows `first` to `last - 1` of a block, which nobody can go on after."""

    def read(chosen: range) -> datasets.Dataset:
        return block.read(range(first + chosen.start, first + chosen.stop, chosen.step))

    begin, end = (replace(block.begin, row=block.begin.row + row) for row in (first, last))
    return replace(block, n_rows=last - first, read=read, begin=begin, end=end)


def _placed(block: RawBlock, part: int, turn: int, seen: int, stand: dict[str, object]) -> RawBlock:
    """A block of a part of a mixture, after `seen` rows of the pass; `stand` is how to go on after it."""
    begin = replace(block.begin, turn=turn, seen=seen)
    end = replace(block.end, turn=turn, seen=seen + block.n_rows, state=stand)
    return replace(block, begin=begin, end=end, part=part)
