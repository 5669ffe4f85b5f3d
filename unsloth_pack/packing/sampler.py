"""PackedSampler: deals packed rows out to the ranks of a distributed run, with equal work for each.

The global order of rows depends on the seed and the epoch alone. It is cut into windows of
`world_size * rows_per_rank` rows. Within a window, the rows are dealt out so that all ranks have about the
same work. So an update sees the same rows on any number of ranks, as long as windows have the same size.
"""

import hashlib
import heapq
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.packing.planner import as_lengths, check_positive


@dataclass(frozen=True)
class CostSpread:
    """How uneven the ranks' work is in one epoch; 0 is even.

    All but `waiting` are (largest - smallest) / mean of the ranks' sums.
    """

    attention: float  # of squared document lengths
    tokens: float
    waiting: float  # the share of time that the average rank waits for the slowest, window by window
    vision: float = 0.0  # of work on images; 0 where there are none

    def __str__(self) -> str:
        on_images = f"images {self.vision:.2%}, " if self.vision else ""
        return (
            f"estimated spread between ranks: attention {self.attention:.2%}, tokens {self.tokens:.2%}, "
            f"{on_images}waiting {self.waiting:.2%}"
        )


class PackedSampler:
    """Row numbers for one rank, as `torch.utils.data.DataLoader(sampler=...)` takes them.

        sampler = PackedSampler(dataset["seq_lengths"], world_size=8, rank=3, rows_per_rank=4)
        print(sampler.spread())

    Args:
        seq_lengths: document lengths of every packed row, in tokens.
        world_size, rank: number of ranks, and the number of this one.
        rows_per_rank: rows that a rank takes between two points at which ranks wait for each other: the
            micro-batch, or the micro-batch times the accumulation if gradients are exchanged only at an
            update. With one row per rank, work cannot be evened out within a window, only over the epoch.
        seed: of the order.
        shuffle: False keeps the rows' own order.
        batch_size: rows of a rank's micro-batch, of which `rows_per_rank` is a multiple.
        drop_last: leave out the rows after the last whole window. Otherwise the last window is shorter; on
            several ranks, the first rows of the order are repeated if it lacks rows for whole micro-batches.
        attention_weight: 0 to 1, the attention's share of the time of an average row; the rest is in
            proportion to its tokens.
        vision_work: of every row, the work on its images, in tokens that take as long without attention;
            None where no row has images.

    Raises:
        InputError: an argument is out of its range, a row has no documents, or there are too few rows.
    """

    def __init__(
        self,
        seq_lengths: Sequence[Sequence[int]],
        world_size: int = 1,
        rank: int = 0,
        *,
        rows_per_rank: int = 1,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        attention_weight: float = 0.5,
        vision_work: Sequence[float] | np.ndarray | None = None,
    ):
        self.world_size = check_positive("world_size", world_size)
        self.rows_per_rank = check_positive("rows_per_rank", rows_per_rank)
        self.batch_size = check_positive("batch_size", batch_size)
        if rows_per_rank % batch_size:
            raise InputError(f"rows_per_rank is {rows_per_rank}; give a multiple of batch_size {batch_size}")
        if rank not in range(world_size):
            raise InputError(f"rank is {rank!r} of {world_size}; give 0 to {world_size - 1}")
        require_whole("seed", seed, 0)
        if not 0 <= attention_weight <= 1:
            raise InputError(f"attention_weight is {attention_weight!r}; give a share from 0 to 1")
        self.rank, self.seed = int(rank), int(seed)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.attention_weight = float(attention_weight)
        self.tokens, self.squares = _row_costs(seq_lengths)
        self.cost = (
            attention_weight * self.squares / self.squares.mean()
            + (1 - attention_weight) * self.tokens / self.tokens.mean()
        )
        self.vision = np.zeros(len(self.cost)) if vision_work is None else np.asarray(vision_work, np.float64)
        if len(self.vision) != len(self.cost) or not (self.vision >= 0).all():
            raise InputError(f"vision_work needs a number from 0 for each of the {len(self.cost)} rows")
        self.cost += (1 - attention_weight) * self.vision / self.tokens.mean()
        if drop_last and len(self.cost) < self.window:
            raise InputError(
                f"{len(self.cost)} rows do not fill a window of {world_size} ranks with {rows_per_rank} rows "
                "each; set drop_last=False, or use fewer ranks"
            )
        self.epoch = 0
        self._start = 0  # rows of this rank with which iteration begins
        self._done = 0  # rows of this rank that were given out last

    @property
    def window(self) -> int:
        """Rows that all ranks together take between two points at which they wait for each other."""
        return self.world_size * self.rows_per_rank

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at its first row; an epoch that was resumed keeps its position."""
        require_whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._start, self._done = int(epoch), 0, 0

    def global_order(self) -> np.ndarray:
        """`[rows]` int64: all rows in the order of this epoch, the same for any number of ranks."""
        rows = np.arange(len(self.cost))
        return np.random.default_rng([self.seed, self.epoch]).permutation(rows) if self.shuffle else rows

    def __len__(self) -> int:
        """Rows of this rank in this epoch, including those that it has given out already."""
        return sum(map(len, self._windows())) // self.world_size

    def __iter__(self) -> Iterator[int]:
        """This rank's rows of the epoch; of a resumed one those that remain, until all were given out.

        An iterator that is left halfway has no effect on the next one.
        """
        if self._start >= len(self):
            self._start = 0
        self._done = self._start
        rows = self.assignment()[self.rank, self._start :].tolist()
        for done, row in enumerate(rows, self._start + 1):
            self._done = done
            yield row
        self._start = self._done

    def assignment(self) -> np.ndarray:
        """`[world_size, rows of a rank]` int64: the rows of every rank, in order."""
        ranks: list[list[int]] = [[] for _ in range(self.world_size)]
        so_far = [0.0] * self.world_size
        for window in self._windows():
            shares = _even_shares(self.cost[window].tolist(), self.world_size, len(window) // self.world_size)
            idlest_first = sorted(range(self.world_size), key=so_far.__getitem__)
            for rank, (cost, positions) in zip(idlest_first, shares, strict=True):
                so_far[rank] += cost
                ranks[rank] += window[sorted(positions)].tolist()
        return np.array(ranks, np.int64).reshape(self.world_size, -1)

    def dealt_in_turn(self) -> np.ndarray:
        """`[rows]` int64: an order that gives every rank its rows when micro-batches are dealt out in turn,
        as accelerate does with a loader's batches: the first to rank 0, the second to rank 1, ..."""
        if self.world_size == 1:
            return self.assignment().reshape(-1)
        return self.assignment().reshape(self.world_size, -1, self.batch_size).transpose(1, 0, 2).reshape(-1)

    def spread(self) -> CostSpread:
        """The estimated spread of work between ranks over the windows of this epoch."""
        rows = self.assignment()
        by_window = np.add.reduceat(self.cost[rows], np.arange(0, rows.shape[1], self.rows_per_rank), axis=1)
        slowest = by_window.max(axis=0).sum()

        def relative(values: np.ndarray) -> float:
            sums = values[rows].sum(axis=1)
            return float(np.ptp(sums) / sums.mean()) if sums.any() else 0.0

        waiting = float(1 - by_window.mean(axis=0).sum() / slowest) if slowest else 0.0
        return CostSpread(relative(self.squares), relative(self.tokens), waiting, relative(self.vision))

    def state_dict(self, rows_done: int | None = None) -> dict[str, object]:
        """The position in this epoch.

        Args:
            rows_done: rows of this rank that training has seen in this epoch. The default is the rows given
                out, some of which a loader that reads ahead has not passed on yet.
        """
        done = self._done if rows_done is None else int(rows_done)
        return {"epoch": self.epoch, "done": done, "settings": self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; a state of other rows, order or ranks is refused."""
        of_state = {**state, **state["settings"]}  # 0.2.0 kept the number of ranks beside the settings
        for name, value in self._settings().items():
            if (saved := of_state.get(name)) != value:
                raise InputError(
                    f"the sampler was saved with {name}={saved!r} and this one has {value!r}; "
                    "make it with the same rows and arguments"
                )
        self.epoch, self._start, self._done = state["epoch"], state["done"], state["done"]

    def _settings(self) -> dict[str, object]:
        costs = (self.tokens, self.squares, *([self.vision] if self.vision.any() else []))
        names = "world_size rows_per_rank seed shuffle drop_last attention_weight"
        return {name: getattr(self, name) for name in names.split()} | {
            "rows": len(self.cost),
            "tokens": int(self.tokens.sum()),
            "lengths": hashlib.sha256(b"".join(each.tobytes() for each in costs)).hexdigest()[:16],
        }

    def _windows(self) -> list[np.ndarray]:
        order = self.global_order()
        if self.drop_last:
            order = order[: len(order) // self.window * self.window]
        elif self.world_size > 1 and (missing := -len(order) % (self.world_size * self.batch_size)):
            order = np.concatenate([order, np.resize(order, missing)])
        return [order[start : start + self.window] for start in range(0, len(order), self.window)]


def _row_costs(seq_lengths: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """`[rows]` int64 each: the tokens, and the sum of squared document lengths."""
    rows = list(seq_lengths)
    sizes = list(map(len, rows))
    lengths = as_lengths(list(chain.from_iterable(rows))).astype(np.int64)
    if not sizes or min(sizes) == 0 or not lengths.any():
        shown = reprlib.repr(seq_lengths)
        raise InputError(f"seq_lengths are {shown}; give the document lengths of every row, as [[5, 3], [8]]")
    starts = np.cumsum([0, *sizes[:-1]])
    return np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts)


def _even_shares(costs: list[float], shares: int, size: int) -> list[tuple[float, list[int]]]:
    """Deal positions of `costs` into `shares` of `size` each: the costliest left goes to the cheapest share.
    Returns `(cost, positions)` of each share, the costliest first."""
    open_shares: list[tuple[float, int, list[int]]] = [(0.0, i, []) for i in range(shares)]
    done: list[tuple[float, list[int]]] = []
    for position in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        cost, i, positions = heapq.heappop(open_shares)
        positions.append(position)
        cost += costs[position]
        if len(positions) == size:
            done.append((cost, positions))
        else:
            heapq.heappush(open_shares, (cost, i, positions))
    return sorted(done, reverse=True)
