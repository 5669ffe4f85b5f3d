"""The captured step: a decoder's forward and backward over a packed row, replayed as two CUDA graphs.

On a small model a step waits for Python and for thousands of kernel launches; a graph launches all of its
kernels at once. The graphs live inside the decoder, so every trainer gets them. The first rows of a shape run
as usual and are timed. If launching holds the GPU up, the next row is captured, and later rows are copied
into static buffers and replayed.

A shape is the number of tokens, the number of documents and the length of the longest, each rounded up. The
row is padded with a document that no gradient reaches, `cu_seqlens` with empty documents. A capture takes as
long as several steps, so a shape is wide enough for all rows seen so far, and wider if that costs nothing. An
uncaptured step runs as usual, and `StepGraphs.why_not` says why.

Once steps of a shape are captured, so are passes without gradients over its rows: those of a teacher or
reference of the same weights, and of an evaluation.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.capture import (
    CapturedShape,
    DecoderState,
    GraphCache,
    StepOutput,
)
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision, DeviceTimer
from unsloth_pack.cuda_graphs.forward import ForwardGraphs
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder
from unsloth_pack.cuda_graphs.shapes import (
    MAX_FORMS,
    ROWS_BEFORE_CAPTURE,
    WASTE_ALLOWED,
    Embedded,
    EmbeddedShape,
    ShapeBucket,
)
from unsloth_pack.modules import Walkable
from unsloth_pack.packed_row.row import PackedRow

_ROOM = 2  # factor on the needs of the rows so far, if a wider shape costs almost nothing


class StepGraphs(GraphCache):
    """The graphs of one decoder, one pair for each shape of row."""

    def __init__(
        self, why_never: str | None, room_is_free: bool = False, windows: Collection[int | None] = ()
    ):
        super().__init__(why_never, "step", "tokens")
        self.windows = windows  # of its layers, if rows with bidirectional blocks of images can be captured
        self._room_is_free = room_is_free  # room for more and longer documents makes its layers no slower
        self._buckets_seen: set[ShapeBucket] = set()
        self._rows_seen: Counter[tuple[int, tuple[object, ...]]] = Counter()  # by their tokens and kind
        self._graphs: dict[ShapeBucket, CapturedShape]
        self._forwards = ForwardGraphs()
        self._state: DecoderState | None
        self._is_trusted = False  # True if the decoder matched in the last step
        self._trials: defaultdict[EmbeddedShape | None, CaptureDecision] = defaultdict(CaptureDecision)
        self._on_trial: ShapeBucket | None = None  # of the row that runs next

    def let_go(self, module: Walkable) -> None:
        """Drop the graphs of a changed module, with their memory."""
        super().let_go(module)
        if not self._graphs:
            self._forwards = ForwardGraphs()

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[object, ...]]:
        return StepGraphs, (self.why_never, self._room_is_free, self.windows)

    def __str__(self) -> str:
        largest = max(self._graphs, key=lambda bucket: bucket.tokens, default=None)
        times = None if largest is None else self._trials[largest.embedded].times(largest.tokens)
        shown = "" if times is None else "; the GPU computes {}, Python launches {}".format(*times)
        return self._describe(bucket.tokens for bucket in self._graphs) + shown

    def replay(
        self,
        decoder: CapturableDecoder,
        row: PackedRow,
        inputs: Tensor | Embedded,
        router_logits: bool = False,
    ) -> StepOutput | None:
        """Replay a row, or return None if `run` has to decide. Arguments as for `run`.

        The check that the decoder still matches takes Python a millisecond or two, so the device starts
        before it. In the rare case of a change, its results are discarded.
        """
        self._on_trial = None
        may_begin = self._is_trusted and self.why_never is None
        if not may_begin or not decoder.training or not torch.is_grad_enabled():
            return None
        bucket = ShapeBucket.of(row, router_logits, EmbeddedShape.of(inputs))
        nearest = self._nearest(row, bucket)
        if nearest is None or nearest.tokens > WASTE_ALLOWED * bucket.tokens or self._memory.is_awaited:
            return None
        captured = self._graphs[nearest]
        with _device_of(inputs):
            with self._trials[bucket.embedded].replay(nearest.tokens, row.device):
                tensors = captured.launch(row, inputs)
            if not self._is_unchanged(decoder):
                self._is_trusted = False
                DeviceTimer(row.device).wait()  # the graphs are dropped next and must have finished
                return None
            self._buckets_seen.add(bucket)
            self.why_not = None
            return captured.output(row, tensors)

    def _is_unchanged(self, decoder: CapturableDecoder) -> bool:
        state = self._state
        if state is None or not state.matches(decoder):
            return False
        return state.why_not_captured() is None and state.dropout_matches()

    def run(
        self,
        decoder: CapturableDecoder,
        row: PackedRow,
        inputs: Tensor | Embedded,
        router_logits: bool = False,
    ) -> StepOutput | None:
        """Replay or capture a row of token ids `[B, T]` or embeddings; None if it runs uncaptured."""
        self._on_trial = None
        if self.why_never is not None:
            return None
        own = ShapeBucket.of(row, router_logits, EmbeddedShape.of(inputs))
        if not torch.is_grad_enabled():
            return self._run_forward(decoder, row, inputs, own)
        # Spares the look at the decoder if no graphs are needed
        if decoder.training and not self._graphs and self._needs_no_graphs(own):
            self._on_trial = own
            return None
        state = self._state
        if state is None or not state.matches(decoder):
            state = self._start_over(decoder)
        self.why_not = state.why_not_captured() or self._why_not_row(row, own.embedded, state)
        if self.why_not is not None:
            return None
        if not state.dropout_matches():  # compared last: evaluation and probes turn it off for a while
            self._start_over(decoder)
        if self._memory.is_awaited:
            self.why_not = "the row before has not been through its backward pass yet"
            return None
        with _device_of(inputs):  # a capture uses the current device, which may be another
            bucket = self._bucket_for(decoder, row, own)
            if bucket is None:
                return None
            self._is_trusted = True
            captured = self._graphs[bucket]
            with self._trials[own.embedded].replay(bucket.tokens, row.device):
                tensors = captured.launch(row, inputs)
            return captured.output(row, tensors)

    def _run_forward(
        self, decoder: CapturableDecoder, row: PackedRow, inputs: Tensor | Embedded, own: ShapeBucket
    ) -> StepOutput | None:
        """Replay a pass without gradients, if steps of its shape are captured: of a teacher or reference.

        The first of a decoder in another state, such as without its adapter, is captured.
        """
        nearest, state = self._nearest(row, own), self._state
        if nearest is None or nearest.tokens > WASTE_ALLOWED * own.tokens or state is None:
            return None
        with _device_of(inputs):
            captured = self._forwards.find(decoder, nearest)
            if captured is None and not state.has_hooks and state.drops_nothing():
                captured = self._forwards.capture(decoder, nearest, row.device, self.windows)
            return None if captured is None else captured.replay(row, inputs)

    def _why_not_row(self, row: PackedRow, embedded: EmbeddedShape | None, state: DecoderState) -> str | None:
        """Explain why this row of a step is not captured, or None."""
        if len(row.blocks) and not self.windows:
            return "the tokens of images see each other in both directions, which is computed on the host"
        if row.parent is not None and not self._room_is_free:
            return "a row with a shared prefix runs on another attention backend"
        if not state.bytes_of_gradients and (embedded is None or not embedded.trains):
            return "no weight of the decoder is trained, nor its inputs"
        return None

    @contextmanager
    def tried(self, row: PackedRow) -> Iterator[None]:
        """Wrap the forward pass of a row that `run` has left uncaptured, to measure it if necessary."""
        bucket, self._on_trial = self._on_trial, None
        if bucket is None:
            yield
            return
        with self._trials[bucket.embedded].trial(bucket.tokens, row.device):
            yield

    def _start_over(self, decoder: CapturableDecoder) -> DecoderState:
        self._graphs.clear()
        self._forwards = ForwardGraphs()
        self._state, self._is_trusted = DecoderState(decoder), False
        return self._state

    def _bucket_for(
        self, decoder: CapturableDecoder, row: PackedRow, bucket: ShapeBucket
    ) -> ShapeBucket | None:
        """Capture the row's own shape, or return one that fits: padding costs less than launches."""
        self._buckets_seen.add(bucket)
        self._rows_seen[bucket.tokens, bucket.kind] += 1
        nearest = self._nearest(row, bucket)
        is_common = self._rows_seen[bucket.tokens, bucket.kind] > ROWS_BEFORE_CAPTURE
        if nearest is None:
            self._on_trial = bucket
            wanted = is_common or bool(self._graphs)  # once anything is captured, all kernels are compiled
        else:
            wanted = is_common and nearest.tokens > WASTE_ALLOWED * bucket.tokens
        wanted = wanted and len(self._graphs) < MAX_FORMS
        is_worth_it = self._is_worth_it(bucket, row.device) if wanted or nearest is None else False
        if wanted and is_worth_it:
            self._on_trial = None
            bucket = bucket.widened(self._buckets_seen, _ROOM if self._room_is_free else 1)
            capture = partial(CapturedShape, decoder, bucket, row.device, self._memory, self.windows)
            return bucket if self._try(bucket, capture, row.device) else None
        if nearest is not None:
            self.why_not = None
        return nearest

    def _nearest(self, row: PackedRow, own: ShapeBucket) -> ShapeBucket | None:
        """Return the smallest captured shape that fits a row with a shape of its own."""
        holding = [bucket for bucket in self._graphs if bucket.holds(row, own.router_logits, own.embedded)]
        return min(holding, key=lambda bucket: bucket.size, default=None)

    def _is_worth_it(self, bucket: ShapeBucket, device: torch.device) -> bool:
        """True if a replay is known to save time and leaves enough memory; else sets `why_not`."""
        trials = self._trials[bucket.embedded]
        if not trials.is_held_up(bucket.tokens):
            self._needs_no_graphs(bucket)
            return False
        gradients = 0 if self._state is None else self._state.bytes_of_gradients
        self.why_not = trials.why_too_large(bucket.tokens, device, gradients)
        return self.why_not is None

    def _needs_no_graphs(self, bucket: ShapeBucket) -> bool:
        """True if rows of this size are known not to wait for Python; sets `why_not`."""
        why = self._trials[bucket.embedded].why_not_held_up(bucket.tokens)
        self.why_not = why or self.why_not
        return why is not None


def _device_of(inputs: Tensor | Embedded) -> torch.cuda.device_of:
    return torch.cuda.device_of(inputs.embeds if isinstance(inputs, Embedded) else inputs)
