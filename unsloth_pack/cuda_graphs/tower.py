"""The captured tower: the forward pass of a frozen tower over the images of a row, replayed as a CUDA graph.

A tower that trains nothing makes features and no gradients. Where its images are few or small, launching its
layers takes longer than computing them. So the first rows of a size run as usual and are timed. Where
launching holds the GPU up, the next one is captured, and later rows are copied into static buffers and
replayed. A row is padded with patches that stand in segments of their own, which no image sees; a batch of
images of one size with images of zeros.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.cuda_graphs.capture import ModuleState
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision, longer_than_launching
from unsloth_pack.cuda_graphs.memory import GraphMemory, alias_memory, what_broke
from unsloth_pack.cuda_graphs.shapes import (
    MOST_FORMS,
    ROWS_BEFORE_CAPTURE,
    WASTE_ALLOWED,
    ShapeBucket,
    autocast_dtype,
)
from unsloth_pack.packed_row.row import PackedRow, round_up

_WRONG_FROM = 1 / 16  # relative error of features, 8 units of bfloat16: other sizes of GEMMs round otherwise

logger = logging.getLogger("unsloth_pack")

Output = Any  # a ModelOutput of transformers: tensors and lists of tensors by name


@dataclass(frozen=True, eq=False)
class Patches:
    """What a tower is given of the images of a row: P patches of all of them, or a batch of P images.

    Args:
        pixels: `[P, pixels of a patch]`, or `[P, channels, height, width]`.
        by_patch: `[P / n, ..]` each, a row for each run of n patches, by the names under which the tower
            takes them.
        places: of these, the name of the one that says to which place each run goes; None where all stay.
        rows: the segments within which layers attend: the images, and their windows where there are any.
            None in a batch, whose images see nothing else.
        axis: along which patches lie in what the tower makes.
        asked: what else the call asks for, by name.
    """

    pixels: Tensor
    by_patch: Mapping[str, Tensor] = field(default_factory=dict)
    places: str | None = None
    rows: Sequence[PackedRow] = ()
    axis: int = 0
    asked: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """`[P / n, ..]` each: all that graphs copy."""
        return [self.pixels, *self.by_patch.values()]

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the sizes that differ between rows."""
        pixels = self.pixels.dtype, *self.pixels.shape[1:]
        return autocast_dtype(), pixels, tuple(sorted(self.asked.items()))


@dataclass(frozen=True)
class PatchesForm:
    """The sizes of a row's patches, rounded up. Rows of one form replay the same graph.

    Args:
        n_patches: or images of a batch.
        rows: the forms of their segments.
        kind: all that has to be the same.
    """

    n_patches: int
    rows: tuple[ShapeBucket, ...]
    kind: tuple[object, ...]

    @classmethod
    def of(cls, patches: Patches) -> "PatchesForm":
        rows = tuple(map(ShapeBucket.of, patches.rows))
        n_patches = rows[0].tokens if rows else round_up(len(patches.pixels))
        return cls(n_patches, rows, patches.kind)

    def holds(self, patches: Patches) -> bool:
        """Whether the patches fit into the form, under the autocast that is on now."""
        fits = self.kind == patches.kind and len(patches.pixels) <= self.n_patches
        fits = fits and len(self.rows) == len(patches.rows)
        return fits and all(form.holds(row) for form, row in zip(self.rows, patches.rows, strict=True))

    def widened(self, others: Sequence["PatchesForm"]) -> "PatchesForm":
        """This form with as many segments, and as long ones, as the widest of others."""
        forms = (form.widened((other.rows[n] for other in others), 1) for n, form in enumerate(self.rows))
        return replace(self, rows=tuple(forms))


Run = Callable[[Patches], Output]  # the tower's own forward pass


class TowerGraphs:
    """The graphs of one tower, one for each form of patches. Copies and pickles hold no graphs.

    Args:
        why_never: why no row is captured, known when the model is patched; None where some may be.
        unit: what rows have, as the text of this says it.
    """

    def __init__(self, why_never: str | None, unit: str = "patches"):
        self.why_not = why_never
        self._unit = unit
        self._why_never = why_never
        self._graphs: dict[PatchesForm, _CapturedTower] = {}
        self._forms_seen: dict[PatchesForm, None] = {}
        self._rows_seen: Counter[int] = Counter()  # by their patches
        self._state: ModuleState | None = None
        self._drops = False  # whether it drops at random in training
        self._memory = GraphMemory()
        self._trials = CaptureDecision()

    def __reduce__(self) -> tuple[type["TowerGraphs"], tuple[str | None, str]]:
        return TowerGraphs, (self._why_never, self._unit)

    def __str__(self) -> str:
        if not self._graphs:
            return f"not captured: {self.why_not or 'no form of row has come often enough yet'}"
        sizes = ", ".join(map(str, sorted({form.n_patches for form in self._graphs})))
        return f"captured for {len(self._graphs)} forms of rows, of {sizes} {self._unit}"

    def output(self, tower: nn.Module, run: Run, patches: Patches) -> Output:
        """What a tower makes of patches, without gradients: replayed where there is a graph that holds them.

        Args:
            run: computes it.
        """
        if self._why_never is not None:
            return run(patches)
        form = PatchesForm.of(patches)
        with torch.cuda.device_of(patches.pixels):  # a capture is of the current device
            captured = self._graph_for(tower, run, patches, form)
            if captured is not None:
                self.why_not = None
                return captured.replay(patches)
            with self._trials.trial(form.n_patches, patches.pixels.device):
                return run(patches)

    def leave_out(self, why: str) -> None:
        """Note why the row that comes is not captured."""
        self.why_not = self._why_never or why

    def let_go(self, tower: nn.Module) -> None:
        """Drop the graphs of a tower that has changed, with the memory that they hold."""
        if self._state is not None and not self._state.matches(tower):
            self._graphs.clear()
            self._state = None

    def _graph_for(
        self, tower: nn.Module, run: Run, patches: Patches, form: PatchesForm
    ) -> "_CapturedTower | None":
        self.let_go(tower)
        if self._state is None:
            self._state = ModuleState(tower)
            self._drops = any(isinstance(m, nn.Dropout) and m.p for m in tower.modules())
        self.why_not = self._why_not_now(tower, self._state)
        if self.why_not is not None:
            return None
        holding = [held for held in self._graphs if held.holds(patches)]
        nearest = min(holding, key=lambda held: held.n_patches, default=None)
        if nearest is not None and nearest.n_patches <= WASTE_ALLOWED * form.n_patches:
            return self._graphs[nearest]
        self._forms_seen[form] = None
        self._rows_seen[form.n_patches] += 1
        is_common = self._rows_seen[form.n_patches] > ROWS_BEFORE_CAPTURE or bool(self._graphs)
        if not is_common or len(self._graphs) == MOST_FORMS or not self._is_held_up(form):
            return None
        return self._capture(tower, run, patches, form.widened([*self._forms_seen]))

    def _why_not_now(self, tower: nn.Module, state: ModuleState) -> str | None:
        """Why no row of this step is captured, or None."""
        if not tower.training:
            return "the model is not training"
        if state.has_hooks:
            return "modules have hooks"
        return "the tower drops at random" if self._drops else None

    def _is_held_up(self, form: PatchesForm) -> bool:
        """Whether launching is known to hold the GPU up; `why_not` says so if it does not."""
        is_held_up = self._trials.is_held_up(form.n_patches)
        if is_held_up is False and (times := self._trials.times(form.n_patches)) is not None:
            self.why_not = longer_than_launching(times)
        return bool(is_held_up)

    def _capture(
        self, tower: nn.Module, run: Run, patches: Patches, form: PatchesForm
    ) -> "_CapturedTower | None":
        try:
            captured = _CapturedTower(tower, run, patches, form, self._memory)
            captured.check(patches, run(patches))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            cause = what_broke(error)
        else:
            self._graphs[form] = captured
            return captured
        self._graphs.clear()  # only now: the error held what was computed until then
        self._memory = self._memory.after_broken_capture(patches.pixels.device)
        self._why_never = self.why_not = f"capture failed ({cause})"
        logger.warning("the tower is not captured in CUDA graphs: %s", self._why_never)
        return None


class _CapturedTower:
    """One graph, and the static tensors that it reads and writes. Arguments as of `TowerGraphs`."""

    def __init__(self, tower: nn.Module, run: Run, patches: Patches, form: PatchesForm, memory: GraphMemory):
        device, P = patches.pixels.device, form.n_patches
        self._rows = [PackedRow.static(P, each.segments, each.longest, device) for each in form.rows]
        static = [
            memory.input(number, P * len(x) // len(patches.pixels), x[0].numel(), x.dtype, device)
            for number, x in enumerate(patches.tensors)
        ]
        static = [held.view(-1, *x.shape[1:]) for held, x in zip(static, patches.tensors, strict=True)]
        by_patch = dict(zip(patches.by_patch, static[1:], strict=True))
        self._static = replace(patches, pixels=static[0], by_patch=by_patch, rows=self._rows)
        self._own_places = None
        if patches.places is not None:
            self._own_places = torch.arange(len(by_patch[patches.places]), device=device)
        self._fill(patches)
        self._graph = torch.cuda.CUDAGraph()
        with _not_recomputed(tower):
            with memory.warming_up():
                run(self._static)
            with memory.capturing(self._graph):
                made = run(self._static)
        self._output = _each(alias_memory, made)

    def replay(self, patches: Patches) -> Output:
        """Copies of what the tower makes of patches that the form holds."""
        self._fill(patches)
        self._graph.replay()
        n, P, axis = len(patches.pixels), len(self._static.pixels), patches.axis
        return _each(lambda x: x.narrow(axis, 0, x.shape[axis] * n // P).clone(), self._output)

    def check(self, patches: Patches, expected: Output) -> None:
        """Compare a replay with what the tower itself makes of the same patches.

        Raises:
            RuntimeError: they differ by more than rounding explains.
        """
        for made, wanted in zip(_flat(self.replay(patches)), _flat(expected), strict=True):
            if not (made - wanted).norm() <= _WRONG_FROM * wanted.norm() and bool(wanted.isfinite().all()):
                raise RuntimeError("a replay makes other features than the tower itself")

    def _fill(self, patches: Patches) -> None:
        for static, given in zip(self._static.tensors, patches.tensors, strict=True):
            static[: len(given)].copy_(given)
            static[len(given) :].zero_()  # a NaN of a row before must not stay: kernels multiply it by 0
        if patches.places is not None and self._own_places is not None:
            n_given = len(patches.by_patch[patches.places])
            self._static.by_patch[patches.places][n_given:].copy_(self._own_places[n_given:])
        for static_row, row in zip(self._rows, patches.rows, strict=True):
            static_row.fill(row)


def _each(change: Callable[[Tensor], Tensor], output: Output) -> Output:
    """The output with every tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):
        return type(output)(**{name: _each(change, value) for name, value in output.items()})
    if isinstance(output, (list, tuple)):
        return type(output)(_each(change, value) for value in output)
    return output


def _flat(output: Output) -> list[Tensor]:
    """All tensors of an output."""
    found: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        found.append(x.float())
        return x

    _each(noted, output)
    return found


@contextmanager
def _not_recomputed(tower: nn.Module) -> Iterator[None]:
    """Layers run as they are: there is no backward pass, and checkpoints read the generator of random
    numbers, which a capture forbids."""
    layers: list[Any] = [m for m in tower.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
