"""Several sources of rows as one stream: one after the other, or interleaved by their weights.

A mixture that interleaves draws the sources of `_ROUND` rows at a time. The rows of a round that come from
one source come together. So a block holds rows of one source, and the documents that wait to be packed hold
rows of all. Every round has random numbers of its own, from the seed, the pass and the number of the round. A
place in the stream is therefore the number of the round, where each source stood when it began, and how many
rows of it are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.mixture import MIXTURES
from unsloth_pack.data.streaming import Place, RawBlock, RowSource
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

_ROUND = 1000  # rows that are drawn together


@dataclass(frozen=True)
class _Stand:
    """Where one source of a mixture stands.

    Args:
        place: the begin of a block of it.
        passed: rows after that place that are done.
        turns: how often it has been read to its end.
    """

    place: Place = field(default_factory=Place)
    passed: int = 0
    turns: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"place": self.place.as_json(), "passed": self.passed, "turns": self.turns}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> _Stand:
        return cls(Place(**found["place"]), found["passed"], found["turns"])


class MixedRows:
    """The rows of several sources.

    Args:
        sources: where they come from.
        weights: of the sources, see `mixture`; whole numbers where they are concatenated.
        how: one of `MIXTURES`.
        seed: of the draws.

    Raises:
        InputError: a weight is a fraction, and the sources are concatenated.
    """

    option = ""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], how: str, seed: int):
        self.parts = tuple(sources)
        self._weights, self._how, self._seed = tuple(weights), how, seed
        self.name = ", ".join(source.name for source in sources)
        fractions = [(s, w) for s, w in zip(sources, weights, strict=True) if w % 1]
        if MIXTURES[how] is None and fractions:
            source, weight = fractions[0]
            raise InputError(
                f"{source.name}: weight {weight:g} is a share of documents that nobody has counted, as the "
                "data streams; give a whole number, or --mixture interleave_under",
                about=f"{source.option}.weight",
            )

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        one_pass = self._concatenated if MIXTURES[self._how] is None else self._interleaved
        return one_pass(place)

    def _concatenated(self, place: Place) -> Iterator[RawBlock]:
        order = [part for part, weight in enumerate(self._weights) for _ in range(int(weight))]
        state = place.state or {"number": 0, "place": Place().as_json()}
        inner = Place(**state["place"])
        seen = place.seen
        for number in range(state["number"], len(order)):
            for block in self.parts[order[number]].one_pass(inner):
                begin = replace(block.begin, turn=place.turn, seen=seen)
                seen += block.n_rows
                stand = {"number": number, "place": block.end.as_json()}
                end = replace(block.end, turn=place.turn, seen=seen, state=stand)
                yield replace(block, begin=begin, end=end, part=order[number])
                inner = block.end
            self._refuse_nothing(order[number], inner)
            inner = Place()

    def _interleaved(self, place: Place) -> Iterator[RawBlock]:
        begin_of_pass = [_Stand().as_json()] * len(self.parts)
        state = place.state or {"round": 0, "done": 0, "stands": begin_of_pass}
        number, done, seen = state["round"], state["done"], place.seen
        stands = [_Stand.of_json(found) for found in state["stands"]]
        readers = [_Reader(source, stand) for source, stand in zip(self.parts, stands, strict=True)]
        is_over = False
        while not is_over:
            begin_of_round = [reader.stand.as_json() for reader in readers]
            pieces, is_over = self._round(readers, place.turn, number)
            rows_before = 0
            for part, block in pieces:
                passed = min(block.n_rows, max(0, done - rows_before))
                rows_before += block.n_rows
                if passed == block.n_rows:
                    continue
                some = _rows_of(block, passed, block.n_rows)
                begin = replace(some.begin, turn=place.turn, seen=seen)
                seen, done = seen + some.n_rows, rows_before
                stand = {"round": number, "done": done, "stands": begin_of_round}
                end = replace(some.end, turn=place.turn, seen=seen, state=stand)
                yield replace(some, begin=begin, end=end, part=part)
            number, done = number + 1, 0

    def _round(
        self, readers: Sequence[_Reader], turn: int, number: int
    ) -> tuple[list[tuple[int, RawBlock]], bool]:
        """The rows of a round, as blocks with the number of their source; and whether it ends the pass."""
        shares = np.array(self._weights) / sum(self._weights)
        draws = np.random.default_rng([self._seed, turn, number]).choice(len(shares), _ROUND, p=shares)
        blocks: list[list[RawBlock]] = [[] for _ in readers]
        used_up_at: list[int | None] = [-1 if reader.stand.turns else None for reader in readers]
        for part, reader in enumerate(readers):
            places = np.flatnonzero(draws == part)
            rows = 0
            while rows < len(places):
                blocks[part].append(reader.next(len(places) - rows))
                rows += blocks[part][-1].n_rows
                if used_up_at[part] is None and reader.stand.turns:
                    used_up_at[part] = int(places[rows - 1])
        ends = [at for at in used_up_at if at is not None]
        is_under = MIXTURES[self._how] == "first_exhausted"
        is_over = bool(ends) if is_under else len(ends) == len(readers)
        if is_over:
            draws = draws[: (min(ends) if is_under else max(ends)) + 1]
        pieces = [
            (part, piece)
            for part, of_part in enumerate(blocks)
            for piece in _first(of_part, int((draws == part).sum()))
        ]
        return pieces, is_over

    def _refuse_nothing(self, part: int, place: Place) -> None:
        if not place.seen:
            raise InputError(
                f"{self.parts[part].name}: 0 rows; give a dataset with at least one",
                about=self.parts[part].option,
            )


class _Reader:
    """The rows of a source, some at a time, over and over.

    Attributes:
        stand: after the rows that were given out.
    """

    def __init__(self, source: RowSource, stand: _Stand):
        self._source, self.stand = source, stand
        self._blocks = source.one_pass(stand.place)
        self._block: RawBlock | None = None
        self._rows = 0  # of the block that are done
        self._skip(stand.passed)

    def next(self, most: int) -> RawBlock:
        """The next rows, at least one and not more than `most`, of one block."""
        block = self._block or self._next_block()
        first, last = self._rows, min(block.n_rows, self._rows + most)
        self._rows = last
        self.stand = replace(self.stand, place=block.begin, passed=last)
        if last == block.n_rows:
            self._block = None
            self.stand = replace(self.stand, place=block.end, passed=0)
            self._look_ahead()
        return _rows_of(block, first, last)

    def _look_ahead(self) -> None:
        """Read the next block now: whether there is one decides whether the source is used up."""
        block = next((block for block in self._blocks if block.n_rows), None)
        if block is None:
            self.stand = _Stand(Place(), 0, self.stand.turns + 1)
            self._blocks = self._source.one_pass(Place())
            return
        self._block, self._rows = block, 0

    def _next_block(self) -> RawBlock:
        self._look_ahead()
        if self._block is None:
            raise InputError(
                f"{self._source.name}: 0 rows; give a dataset with at least one", about=self._source.option
            )
        return self._block

    def _skip(self, rows: int) -> None:
        while rows:
            block = self._block or self._next_block()
            self._rows = min(rows, block.n_rows)
            rows -= self._rows
            if self._rows == block.n_rows:
                self._block = None


def _first(blocks: Sequence[RawBlock], rows: int) -> Iterator[RawBlock]:
    """The blocks that hold the first rows, the last of them cut."""
    for block in blocks:
        if not rows:
            return
        some = min(rows, block.n_rows)
        yield _rows_of(block, 0, some)
        rows -= some


def _rows_of(block: RawBlock, first: int, last: int) -> RawBlock:
    """The rows `first` to `last - 1` of a block, which nobody can go on after."""
    row = block.begin.row
    return replace(
        block,
        n_rows=last - first,
        read=partial(_some, block, first),
        begin=replace(block.begin, row=row + first),
        end=replace(block.begin, row=row + last),
    )


def _some(block: RawBlock, first: int, chosen: range) -> datasets.Dataset:
    return block.read(range(first + chosen.start, first + chosen.stop, chosen.step))
