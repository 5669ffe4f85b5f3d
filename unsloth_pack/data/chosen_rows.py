"""Rows of a stream under other column names, or its first rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from unsloth_pack.data.columns import renamed
from unsloth_pack.data.raw_blocks import Place, RawBlock, RowSource
from unsloth_pack.errors import about

if TYPE_CHECKING:
    import datasets


class ChosenRows:
    """The rows of another source.

    Args:
        columns: what their columns are called here, see `renamed`.
        limit: how many are read in a pass; None for all.
        option: that names them; empty where the other source knows.
    """

    def __init__(
        self, source: RowSource, columns: Mapping[str, str | None], limit: int | None, option: str = ""
    ):
        self.name, self._source, self._columns, self._limit = source.name, source, columns, limit
        self.option = option or source.option
        self.parts: tuple[RowSource, ...] = (self,)
        if len(source.parts) > 1:
            self.parts = tuple(ChosenRows(part, columns, limit) for part in source.parts)

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        if self._limit is not None and place.seen >= self._limit:
            return
        with about(self.option):
            yield from self._blocks(place)

    def _blocks(self, place: Place) -> Iterator[RawBlock]:
        for block in self._source.one_pass(place):
            block = replace(block, option=block.option or self.option)
            if self._columns:
                block = replace(block, read=partial(self._renamed, block), columns=self._columns)
            if self._limit is not None and block.end.seen >= self._limit:
                rows = self._limit - block.begin.seen
                yield replace(block, n_rows=rows, end=replace(block.end, seen=self._limit))
                return
            yield block

    def _renamed(self, block: RawBlock, chosen: range) -> datasets.Dataset:
        """Those of the first block have to have the columns; a few rows of any block may lack them."""
        rows = block.n_rows if self._limit is None else min(self._limit, block.n_rows)
        is_first = block.begin.seen == 0 and len(chosen) == rows
        return renamed(block.read(chosen), self._columns, may_lack=not is_first)
