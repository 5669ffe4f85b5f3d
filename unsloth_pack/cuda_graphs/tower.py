"""The captured tower: the forward pass of a frozen tower over the images of a row, replayed as a CUDA graph.

For few or small images, launching a tower's layers takes longer than computing them. So the first rows of a
size run as usual and are timed. If launching holds the GPU up, the next row is captured, and later rows are
copied into static buffers and replayed. A row is padded with patches in segments of their own, a batch of
images of one size with images of zeros.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from unsloth_pack.cuda_graphs.capture import GraphCache, ModuleState
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision
from unsloth_pack.cuda_graphs.memory import GraphMemory, alias_memory
from unsloth_pack.cuda_graphs.shapes import (
    MAX_FORMS,
    ROWS_BEFORE_CAPTURE,
    WASTE_ALLOWED,
    ShapeBucket,
    autocast_dtype,
)
from unsloth_pack.modules import attribute_set
from unsloth_pack.packed_row.row import PackedRow, round_up

# Of features, relative; 8 units of bfloat16, because GEMMs of other sizes round differently
_MAX_ERROR = 1 / 16

Output = Any  # a ModelOutput of transformers: tensors and lists of tensors by name


@dataclass(frozen=True, eq=False)
class Patches:
    """The inputs of a tower for the images of a row: P patches of all of them, or a batch of P images."""

    pixels: Tensor  # `[P, pixels of a patch]`, or `[P, channels, height, width]`
    # `[P / n, ..]` each, a row for each run of n patches, by the tower's argument names
    by_patch: Mapping[str, Tensor] = field(default_factory=dict)
    places: str | None = None  # the name among them of the permutation of the runs
    # the segments within which layers attend: images, and perhaps windows; none for a batch
    rows: Sequence[PackedRow] = ()
    axis: int = 0  # of the patches in the tower's outputs
    asked: Mapping[str, int | None] = field(default_factory=dict)  # further arguments of the call

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that graphs copy, `[P / n, ..]` each."""
        return [self.pixels, *self.by_patch.values()]

    @property
    def kind(self) -> tuple[object, ...]:
        """All properties but the sizes."""
        pixels = self.pixels.dtype, *self.pixels.shape[1:]
        return autocast_dtype(), pixels, tuple(sorted(self.asked.items()))


@dataclass(frozen=True)
class PatchesShape:
    """The shape of a row's patches: its sizes, rounded up. Rows of one shape replay the same graph."""

    n_patches: int  # or images of a batch
    rows: tuple[ShapeBucket, ...]  # the shapes of their segments
    kind: tuple[object, ...]  # properties that must be equal

    @classmethod
    def of(cls, patches: Patches) -> "PatchesShape":
        rows = tuple(map(ShapeBucket.of, patches.rows))
        n_patches = rows[0].tokens if rows else round_up(len(patches.pixels))
        return cls(n_patches, rows, patches.kind)

    def holds(self, patches: Patches) -> bool:
        """True if the patches fit into the shape, under the current autocast."""
        fits = self.kind == patches.kind and len(patches.pixels) <= self.n_patches
        fits = fits and len(self.rows) == len(patches.rows)
        return fits and all(bucket.holds(row) for bucket, row in zip(self.rows, patches.rows, strict=True))

    def widened(self, others: Sequence["PatchesShape"]) -> "PatchesShape":
        """Widen to the segments of other shapes."""
        buckets = (
            bucket.widened((other.rows[n] for other in others), 1) for n, bucket in enumerate(self.rows)
        )
        return replace(self, rows=tuple(buckets))


Run = Callable[[Patches], Output]  # the tower's own forward pass


class TowerGraphs(GraphCache):
    """The graphs of one tower, one for each shape of patches; `unit` is that of a row's size, for `str()`."""

    def __init__(self, why_never: str | None, unit: str = "patches"):
        super().__init__(why_never, "tower", unit)
        self._graphs: dict[PatchesShape, _CapturedTower]
        self._buckets_seen: dict[PatchesShape, None] = {}
        self._rows_seen: Counter[int] = Counter()  # by their patches
        self._drops = False  # True if it has dropout
        self._trials = CaptureDecision()

    def __reduce__(self) -> tuple[type["TowerGraphs"], tuple[str | None, str]]:
        return TowerGraphs, (self.why_never, self._unit)

    def __str__(self) -> str:
        return self._describe(bucket.n_patches for bucket in self._graphs)

    def output(self, tower: nn.Module, run: Run, patches: Patches) -> Output:
        """Compute a tower's outputs without gradients: replay a graph that fits, or call `run`."""
        if self.why_never is not None:
            return run(patches)
        bucket = PatchesShape.of(patches)
        with torch.cuda.device_of(patches.pixels):  # a capture is of the current device
            captured = self._graph_for(tower, run, patches, bucket)
            if captured is not None:
                self.why_not = None
                return captured.replay(patches)
            with self._trials.trial(bucket.n_patches, patches.pixels.device):
                return run(patches)

    def leave_out(self, why: str) -> None:
        """Note why the next row is not captured."""
        self.why_not = self.why_never or why

    def _graph_for(
        self, tower: nn.Module, run: Run, patches: Patches, bucket: PatchesShape
    ) -> "_CapturedTower | None":
        self.let_go(tower)
        if self._state is None:
            self._state = ModuleState(tower)
            self._drops = any(isinstance(m, nn.Dropout) and m.p for m in tower.modules())
        self.why_not = self._why_not_now(tower, self._state)
        if self.why_not is not None:
            return None
        fitting = (other for other in self._graphs if other.holds(patches))
        nearest = min(fitting, key=lambda other: other.n_patches, default=None)
        if nearest is not None and nearest.n_patches <= WASTE_ALLOWED * bucket.n_patches:
            return self._graphs[nearest]
        self._buckets_seen[bucket] = None
        self._rows_seen[bucket.n_patches] += 1
        is_common = self._rows_seen[bucket.n_patches] > ROWS_BEFORE_CAPTURE or bool(self._graphs)
        if not is_common or len(self._graphs) == MAX_FORMS:
            return None
        if not self._trials.is_held_up(bucket.n_patches):
            self.why_not = self._trials.why_not_held_up(bucket.n_patches)
            return None
        bucket = bucket.widened([*self._buckets_seen])

        def capture() -> _CapturedTower:
            captured = _CapturedTower(tower, run, patches, bucket, self._memory)
            captured.check(patches, run(patches))
            return captured

        return self._graphs[bucket] if self._try(bucket, capture, patches.pixels.device) else None

    def _why_not_now(self, tower: nn.Module, state: ModuleState) -> str | None:
        """Explain why no row of this step is captured, or None."""
        if not tower.training:
            return "the model is not training"
        if state.has_hooks:
            return "modules have hooks"
        return "the tower drops at random" if self._drops else None


class _CapturedTower:
    """One graph, and the static tensors that it reads and writes."""

    def __init__(
        self, tower: nn.Module, run: Run, patches: Patches, bucket: PatchesShape, memory: GraphMemory
    ):
        device, P = patches.pixels.device, bucket.n_patches
        self._rows = [PackedRow.static(P, row.segments, row.longest, device) for row in bucket.rows]
        static = []
        for number, x in enumerate(patches.tensors):
            n_rows = P * len(x) // len(patches.pixels)
            flat = memory.rows("input", number, n_rows, x[0].numel(), x.dtype, device)
            static.append(flat.view(-1, *x.shape[1:]))
        by_patch = dict(zip(patches.by_patch, static[1:], strict=True))
        self._static = replace(patches, pixels=static[0], by_patch=by_patch, rows=self._rows)
        self._own_places = None
        if patches.places is not None:
            self._own_places = torch.arange(len(by_patch[patches.places]), device=device)
        self._fill(patches)
        self._graph = torch.cuda.CUDAGraph()
        # Checkpointing reads the random generator, which a capture forbids
        recomputed = (m for m in tower.modules() if getattr(m, "gradient_checkpointing", False))
        with attribute_set(recomputed, "gradient_checkpointing", False):
            with memory.warming_up():
                run(self._static)
            with memory.capturing(self._graph):
                output = run(self._static)
        self._output = tree_map_only(Tensor, alias_memory, output)

    def replay(self, patches: Patches) -> Output:
        """Replay patches that fit, and copy the outputs."""
        self._fill(patches)
        self._graph.replay()
        n, P, axis = len(patches.pixels), len(self._static.pixels), patches.axis
        return tree_map_only(
            Tensor, lambda x: x.narrow(axis, 0, x.shape[axis] * n // P).clone(), self._output
        )

    def check(self, patches: Patches, expected: Output) -> None:
        """Refuse a replay that differs from the tower's own output by more than rounding explains."""
        for x, right in zip(_list_tensors(self.replay(patches)), _list_tensors(expected), strict=True):
            if not (x - right).norm() <= _MAX_ERROR * right.norm() and bool(right.isfinite().all()):
                raise RuntimeError("a replay makes other features than the tower itself")

    def _fill(self, patches: Patches) -> None:
        for static, x in zip(self._static.tensors, patches.tensors, strict=True):
            static[: len(x)].copy_(x)
            static[len(x) :].zero_()  # an earlier row's NaN must not stay: kernels multiply it by 0
        if patches.places is not None and self._own_places is not None:
            n = len(patches.by_patch[patches.places])
            self._static.by_patch[patches.places][n:].copy_(self._own_places[n:])
        for static_row, row in zip(self._rows, patches.rows, strict=True):
            static_row.fill(row)


def _list_tensors(output: Output) -> list[Tensor]:
    return [x.float() for x in tree_leaves(output) if isinstance(x, Tensor)]
