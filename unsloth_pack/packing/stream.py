"""PackingStream: examples in, packs out, for data without an end and for rollouts.

examples  -> buffer (at most buffer_size) -> plan -> packs that are full enough -> out
                ^                              |
                +------- carry: the rest <-----+
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.packing.in_memory import (
    WHOLE_COLUMNS,
    CutCounts,
    check_overlong,
    join,
    kind_of,
    pieces_of,
)
from unsloth_pack.packing.planner import check_positive, check_strategy, plan_packs

Example = dict[str, Any]  # column -> one value per token

_STATE_VERSION = 1


@dataclass
class StreamCounts(CutCounts):
    """Counts of what went through a stream, beside the counts of what was cut."""

    examples: int = 0  # taken in
    packs: int = 0  # given out, with the next two
    documents: int = 0
    tokens: int = 0
    leftover_documents: int = 0  # dropped at the end, because their pack was not full enough
    leftover_tokens: int = 0


class PackingStream:
    """Packs examples as they come, and keeps at most `buffer_size` of them waiting.

        stream = PackingStream(capacity=2048)
        for pack in stream.pack(examples):
            ...  # {"input_ids": ..., "labels": ..., "seq_lengths": [812, 640, 590]}

    An example is a dict of columns with one value per token, `input_ids` among them, or just the ids. A pack
    has the same columns, with its documents one after another without padding, and the list `seq_lengths`:
    TRL's packed columns. A column of lists gives lists, arrays give arrays, tensors give tensors.

    When `buffer_size` examples or `buffer_tokens` tokens wait, they are planned into groups. Groups filled to
    `min_fill_ratio` go out as packs, in an order shuffled by the seed; the others wait for the next buffer. A
    full group that holds the newest example waits too, because later examples may still fit, unless no other
    group is full enough.
    If no group at all is full enough, the one with the oldest example goes out, so that the buffer never
    grows. At the end no group waits: those that are not full enough go out too, or are dropped and counted.

    `atomic` is for rollouts that are generated while training goes on: segments leave strictly in the order
    in which they came, none is ever split or cut, and `push` refuses a segment if `buffer_size` wait already.

    Args:
        capacity: tokens of a pack.
        buffer_size: examples that may wait.
        min_fill_ratio: above 0, up to 1: the share of `capacity` from which a pack is full enough.
        drop_last: at the end, drop packs that are not full enough. False by default, True in atomic mode.
        strategy: as for `plan_packs`; "bfd" by default, "next_fit" in atomic mode.
        seed: of the order of packs within a buffer; None keeps the planner's order, longest documents first.
        overlong: "error", "truncate", "drop" or "split", as for `pack_sequences`.
        buffer_tokens: tokens that may wait; None for any number. Not in atomic mode.
        by_document: columns that hold one thing a document, of any kind, as its images, which is not copied.
            A pack has the list of them. No document is cut then.

    Raises:
        InputError: an argument is out of its range; atomic mode with `drop_last=False`, another strategy than
            "next_fit", or another `overlong` than "error"; `by_document` where documents may be cut.
    """

    def __init__(
        self,
        capacity: int,
        buffer_size: int = 256,
        min_fill_ratio: float = 0.7,
        drop_last: bool | None = None,
        strategy: str | None = None,
        *,
        seed: int | None = 0,
        overlong: str = "error",
        atomic: bool = False,
        buffer_tokens: int | None = None,
        by_document: Collection[str] = (),
    ):
        if by_document and overlong not in ("error", "drop"):
            raise InputError(f"overlong is {overlong!r} with by_document; choose one of error, drop")
        if not 0 < min_fill_ratio <= 1:
            raise InputError(f"min_fill_ratio is {min_fill_ratio!r}; give a share above 0 and up to 1")
        if seed is not None:
            require_whole("seed", seed, 0)
        if atomic and (
            drop_last is False
            or strategy not in (None, "next_fit")
            or overlong != "error"
            or buffer_tokens is not None
        ):
            raise InputError(
                "atomic mode takes the oldest segment first, cuts none and drops what is left at the end; "
                "leave out drop_last, strategy, overlong and buffer_tokens"
            )
        self.capacity = check_positive("capacity", capacity)
        self.buffer_size = check_positive("buffer_size", buffer_size)
        self.buffer_tokens = None if buffer_tokens is None else check_positive("buffer_tokens", buffer_tokens)
        self.min_fill_ratio = min_fill_ratio
        self.drop_last = atomic if drop_last is None else drop_last
        self.strategy = check_strategy(strategy or ("next_fit" if atomic else "bfd"))
        self.seed = seed
        self.overlong = check_overlong(overlong)
        self.atomic = atomic
        self._by_document = tuple(dict.fromkeys(by_document))
        self.counts = StreamCounts()
        self.consumed = 0
        self._kinds: dict[str, str] | None = None
        self._buffer: list[Example] = []
        self._tokens = 0  # of the buffer
        self._ready: deque[list[Example]] = deque()
        self._plans = 0

    @property
    def waiting(self) -> int:
        """Documents that came in and have not gone out."""
        return len(self._buffer) + sum(map(len, self._ready))

    @property
    def ready(self) -> int:
        """Packs that `pop` gives before it needs more examples."""
        return len(self._ready)

    def pack(self, examples: Iterable[object]) -> Iterator[Example]:
        """Packs of these examples, and of any that wait, to the end of the examples.

        An example is taken only when no pack is ready, so `consumed` always tells where to go on: after
        `load_state_dict`, give the examples from number `consumed` on.
        """
        yield from self._drain()
        for example in examples:
            self.push(example)
            yield from self._drain()
        self.finish()
        yield from self._drain()
        self.consumed = 0

    def push(self, example: object) -> None:
        """Take in one example.

        Raises:
            InputError: it is not an example, has other columns than the first one, has columns of different
                lengths, holds a null, has ids or labels that are not whole numbers, is over-long, or, in
                atomic mode, `buffer_size` segments wait already. The stream stays as it was.
        """
        columns, beside, kinds = self._checked(example)
        if self.atomic and self.waiting >= self.buffer_size:
            raise InputError(
                f"{self.waiting} segments wait and buffer_size is {self.buffer_size}; take packs out first"
            )
        name, length = f"example {self.consumed}", _length(columns)
        pieces = pieces_of(name, length, self.capacity, self.overlong, self.counts)
        self._kinds = kinds
        self.counts.examples += 1
        self.consumed += 1
        for start, end in pieces:
            # A copy: slices of arrays are views
            self._add({name: join([value[start:end]]) for name, value in columns.items()} | beside)

    def pop(self) -> Example | None:
        """The next pack, or None if it needs more examples."""
        if self.atomic and not self._ready and len(self._buffer) >= self.buffer_size:
            self._release_buffer()
        if not self._ready:
            return None
        documents = self._ready.popleft()
        self.counts.packs += 1
        self.counts.documents += len(documents)
        self.counts.tokens += sum(map(_length, documents))
        return _packed(documents, self._by_document)

    def finish(self) -> None:
        """End the input: packs of the waiting examples become ready, or are dropped and counted."""
        if self._buffer:
            self._plan(is_end=True)

    def state_dict(self) -> dict[str, object]:
        """All that determines the next packs, including the waiting examples; `torch.save` can store it."""
        return {
            "version": _STATE_VERSION,
            "settings": self._settings(),
            "consumed": self.consumed,
            "plans": self._plans,
            "kinds": self._kinds,
            "buffer": list(self._buffer),
            "ready": [list(documents) for documents in self._ready],
            "counts": asdict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken.

        Raises:
            InputError: the state has another version, or comes from a stream with other arguments.
        """
        saved = {"version": state.get("version")} | state["settings"]
        for name, value in {"version": _STATE_VERSION, **self._settings()}.items():
            if saved.get(name) != value:
                raise InputError(
                    f"the stream was saved with {name}={saved.get(name)!r} and this one has {value!r}; make "
                    "it with the same arguments"
                )
        self.consumed = state["consumed"]
        self._plans = state["plans"]
        self._kinds = state["kinds"]
        self._buffer = list(state["buffer"])
        self._tokens = sum(map(_length, self._buffer))
        self._ready = deque(list(documents) for documents in state["ready"])
        self.counts = StreamCounts(**state["counts"])

    def _drain(self) -> Iterator[Example]:
        while (pack := self.pop()) is not None:
            yield pack

    def _settings(self) -> dict[str, object]:
        names = "capacity buffer_size min_fill_ratio drop_last strategy seed overlong atomic buffer_tokens"
        settings = {name: getattr(self, name) for name in names.split()}
        return settings | {"by_document": [*self._by_document] or None}

    def _checked(self, example: object) -> tuple[Example, Example, dict[str, str]]:
        """The example's columns of tokens, its columns of the document, and the kind of each of the first."""
        name = f"example {self.consumed}"
        columns: Example = dict(example) if isinstance(example, Mapping) else {"input_ids": example}
        for column in self._by_document:
            if column not in columns:
                raise InputError(f"{name} has no column {column!r}; give it in every example")
        beside = {column: columns.pop(column) for column in self._by_document}
        if "input_ids" not in columns or "seq_lengths" in columns:
            shown = ", ".join(columns)
            raise InputError(
                f"{name} has the columns {shown}; give tokenised examples that are not packed yet"
            )
        kinds = {
            column: str(kind_of(f"{name}, column {column!r},", value, column in WHOLE_COLUMNS))
            for column, value in columns.items()
        }
        for column, value in columns.items():
            if len(value) != _length(columns):
                values = f"{len(value)} values for {_length(columns)} tokens"
                raise InputError(f"{name}: column {column!r} has {values}; give one a token, or remove it")
        if self._kinds not in (None, kinds):
            raise InputError(
                f"{name} has {kinds} and those before it {self._kinds}; give all the same columns and kinds"
            )
        return columns, beside, kinds

    def _add(self, document: Example) -> None:
        if self.atomic and sum(map(_length, self._buffer)) + _length(document) > self.capacity:
            self._release_buffer()
        self._buffer.append(document)
        if self.atomic:
            return
        self._tokens += _length(document)
        is_full = self.buffer_tokens is not None and self._tokens >= self.buffer_tokens
        if is_full or len(self._buffer) >= self.buffer_size:
            self._plan(is_end=False)

    def _release_buffer(self) -> None:
        self._ready.append(self._buffer)
        self._buffer = []

    def _plan(self, *, is_end: bool) -> None:
        """Move groups of the buffer to the packs that are ready; the rest stays, in its order of arrival."""
        lengths = np.array([_length(document) for document in self._buffer])
        groups = [sorted(group) for group in plan_packs(lengths, self.capacity, self.strategy).bins]
        full = [group for group in groups if lengths[group].sum() / self.capacity >= self.min_fill_ratio]
        if is_end:
            leaving = full if self.drop_last else groups
        else:
            newest = len(lengths) - 1
            leaving = [group for group in full if newest not in group]
            leaving = leaving or full or [group for group in groups if 0 in group]
        if self.seed is not None and not self.atomic:
            order = np.random.default_rng([self.seed, self._plans]).permutation(len(leaving))
            leaving = [leaving[i] for i in order]
        self._plans += 1
        self._ready.extend([self._buffer[i] for i in group] for group in leaving)
        gone = {i for group in leaving for i in group}
        self._buffer = [document for i, document in enumerate(self._buffer) if i not in gone]
        if is_end:
            self.counts.leftover_documents += len(self._buffer)
            self.counts.leftover_tokens += sum(map(_length, self._buffer))
            self._buffer = []
        self._tokens = sum(map(_length, self._buffer))


def _length(document: Example) -> int:
    return len(document["input_ids"])


def _packed(documents: list[Example], by_document: Collection[str]) -> Example:
    columns = {name: [document[name] for document in documents] for name in documents[0]}
    pack = {name: parts if name in by_document else join(parts) for name, parts in columns.items()}
    return pack | {"seq_lengths": [_length(document) for document in documents]}
