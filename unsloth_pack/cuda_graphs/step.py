"""The captured step: a decoder's forward and backward over a packed row, replayed as two CUDA graphs.

On a small model a step waits for Python and for thousands of kernel launches. A graph launches all of its
kernels at once. The graphs live inside the decoder, so every trainer gets them: the first rows of a form run
as usual and are timed. Where launching holds the GPU up, the next one is captured, and later rows are copied
into the static buffers and replayed.

A form is the number of tokens, the number of documents and the length of the longest, each rounded up. The
row is padded with a document of its own that no gradient reaches, `cu_seqlens` with empty documents. A
capture takes as long as several steps, so a form is captured wide enough for the rows seen so far, and
wider where that costs nothing. A step that is not captured runs as usual, and `StepGraphs.why_not` says why.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.capture import CapturedForm, DecoderState, StepOutput, capture_form
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision, DeviceTimer, longer_than_launching
from unsloth_pack.cuda_graphs.memory import GraphMemory, what_broke
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder
from unsloth_pack.cuda_graphs.shapes import (
    MOST_FORMS,
    ROWS_BEFORE_CAPTURE,
    WASTE_ALLOWED,
    Embedded,
    EmbeddedForm,
    ShapeBucket,
)
from unsloth_pack.packed_row.row import PackedRow

_ROOM = 2  # times what the rows so far need, where a wider form costs next to nothing

logger = logging.getLogger("unsloth_pack")


class StepGraphs:
    """The graphs of one decoder, one pair for each form of row. Copies and pickles hold no graphs.

    Args:
        why_never: why no row of this model is captured, known when it is patched; None where some may be.
        room_is_free: whether its layers take as long in a form with room for more and longer documents.
        windows: of its layers, where tokens of images see each other in both directions, and rows with such
            blocks may be captured.
    """

    def __init__(
        self, why_never: str | None, room_is_free: bool = False, windows: Collection[int | None] = ()
    ):
        self.why_not = why_never
        self.windows = windows
        self._why_never = why_never
        self._room_is_free = room_is_free
        self._forms_seen: set[ShapeBucket] = set()
        self._rows_seen: Counter[tuple[int, tuple[object, ...]]] = Counter()  # by their tokens and kind
        self._graphs: dict[ShapeBucket, CapturedForm] = {}
        self._state: DecoderState | None = None
        self._is_trusted = False  # whether the decoder was as captured in the last step
        self._memory = GraphMemory()
        self._trials: defaultdict[EmbeddedForm | None, CaptureDecision] = defaultdict(CaptureDecision)
        self._on_trial: ShapeBucket | None = None  # of the row that runs next
        # Why graphs would leave too little memory, by the kind of input and tokens
        self._too_large: dict[tuple[EmbeddedForm | None, int], str | None] = {}

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[object, ...]]:
        return StepGraphs, (self._why_never, self._room_is_free, self.windows)

    def __str__(self) -> str:
        if self._graphs:
            sizes = sorted({form.tokens for form in self._graphs})
            said = f"captured for {len(self._graphs)} forms of rows, of {', '.join(map(str, sizes))} tokens"
            if n_embedded := sum(form.embedded is not None for form in self._graphs):
                said += f", {n_embedded} of them of embeddings"
            largest = max(self._graphs, key=lambda form: form.tokens)
            times = self._trials[largest.embedded].times(largest.tokens)
            if times is not None:
                said += f"; the GPU computes {times.device}, Python launches {times.host}"
            return said
        return f"not captured: {self.why_not or 'no form of row has come often enough yet'}"

    def replay(
        self,
        decoder: CapturableDecoder,
        row: PackedRow,
        inputs: Tensor | Embedded,
        router_logits: bool = False,
    ) -> StepOutput | None:
        """What graphs make of a row, or None where `run` has to decide.

        Looking whether the decoder is as captured takes Python a millisecond or two. So the device begins
        before that. In the rare case that something has changed, what it computes is thrown away.

        Args:
            row, inputs, router_logits: as `run` takes them.
        """
        self._on_trial = None
        may_begin = self._is_trusted and self._why_never is None
        if not may_begin or not decoder.training or not torch.is_grad_enabled():
            return None
        embedded = EmbeddedForm.of(inputs)
        form = ShapeBucket.of(row, router_logits, embedded)
        nearest = self._nearest(row, router_logits, embedded)
        if nearest is None or nearest.tokens > WASTE_ALLOWED * form.tokens:
            return None
        if self._memory.is_awaited:
            return None
        captured = self._graphs[nearest]
        with _device_of(inputs):
            with self._trials[embedded].replay(nearest.tokens, row.device):
                given = captured.launch(row, inputs)
            if not self._is_as_captured(decoder):
                self._is_trusted = False
                DeviceTimer(row.device).wait()  # graphs that are dropped next must not run any more
                return None
            self._forms_seen.add(form)
            self.why_not = None
            return captured.output(row, given)

    def _is_as_captured(self, decoder: CapturableDecoder) -> bool:
        state = self._state
        return (
            state is not None
            and state.matches(decoder)
            and state.why_not_captured() is None
            and state.dropout_matches()
        )

    def let_go(self, decoder: CapturableDecoder) -> None:
        """Drop the graphs of a decoder that has changed, with the memory that they hold."""
        if self._state is not None and not self._state.matches(decoder):
            self._graphs.clear()
            self._state, self._is_trusted = None, False

    def run(
        self,
        decoder: CapturableDecoder,
        row: PackedRow,
        inputs: Tensor | Embedded,
        router_logits: bool = False,
    ) -> StepOutput | None:
        """What a decoder makes of a row, or None where it has to run uncaptured.

        Args:
            row: on a CUDA device.
            inputs: token ids `[B, T]`, or embeddings.
            router_logits: whether these are asked for, too.
        """
        self._on_trial = None
        if self._why_never is not None or not torch.is_grad_enabled():
            return None
        embedded = EmbeddedForm.of(inputs)
        if decoder.training and not self._graphs:  # looking at the decoder would be for nothing, perhaps
            own_form = ShapeBucket.of(row, router_logits, embedded)
            if self._needs_no_graphs(own_form):
                self._on_trial = own_form
                return None
        state = self._state
        if state is None or not state.matches(decoder):
            state = self._drop_graphs_and_look_at(decoder)
        self.why_not = state.why_not_captured() or self._why_not_row(row, embedded, state)
        if self.why_not is not None:
            return None
        if not state.dropout_matches():  # compared only now: evaluation and probes turn it off for a while
            self._drop_graphs_and_look_at(decoder)
        if self._memory.is_awaited:
            self.why_not = "the row before has not been through its backward pass yet"
            return None
        with _device_of(inputs):  # a capture is of the current device, which may be another
            form = self._form_for(decoder, row, router_logits, embedded)
            if form is None:
                return None
            self._is_trusted = True
            captured = self._graphs[form]
            with self._trials[embedded].replay(form.tokens, row.device):
                given = captured.launch(row, inputs)
            return captured.output(row, given)

    def _why_not_row(self, row: PackedRow, embedded: EmbeddedForm | None, state: DecoderState) -> str | None:
        """Why this row of a step is not captured, or None."""
        if len(row.blocks) and not self.windows:
            return "the tokens of images see each other in both directions, which is computed on the host"
        if not state.bytes_of_gradients and (embedded is None or not embedded.trains):
            return "no weight of the decoder is trained, nor what comes in"
        return None

    @contextmanager
    def tried(self, row: PackedRow) -> Iterator[None]:
        """Goes around the forward pass of a row for which `run` has returned None: it may be measured."""
        form, self._on_trial = self._on_trial, None
        if form is None:
            yield
            return
        with self._trials[form.embedded].trial(form.tokens, row.device):
            yield

    def _drop_graphs_and_look_at(self, decoder: CapturableDecoder) -> DecoderState:
        self._graphs.clear()
        self._too_large.clear()
        self._state, self._is_trusted = DecoderState(decoder), False
        return self._state

    def _form_for(
        self,
        decoder: CapturableDecoder,
        row: PackedRow,
        router_logits: bool,
        embedded: EmbeddedForm | None = None,
    ) -> ShapeBucket | None:
        """The row's own form, else any captured one that holds it: waste costs less than launches."""
        form = ShapeBucket.of(row, router_logits, embedded)
        self._forms_seen.add(form)
        self._rows_seen[form.tokens, form.kind] += 1
        nearest = self._nearest(row, router_logits, embedded)
        is_common = self._rows_seen[form.tokens, form.kind] > ROWS_BEFORE_CAPTURE
        if nearest is None:
            self._on_trial = form
            wanted = is_common or bool(self._graphs)  # once anything is captured, all kernels are compiled
        else:
            wanted = is_common and nearest.tokens > WASTE_ALLOWED * form.tokens
        wanted = wanted and len(self._graphs) < MOST_FORMS
        is_worth_it = self._is_worth_it(form, row.device) if wanted or nearest is None else False
        if wanted and is_worth_it:
            self._on_trial = None
            form = form.widened(self._forms_seen, _ROOM if self._room_is_free else 1)
            return form if self._capture(decoder, form, row.device) else None
        if nearest is not None:
            self.why_not = None
        return nearest

    def _nearest(
        self, row: PackedRow, router_logits: bool, embedded: EmbeddedForm | None
    ) -> ShapeBucket | None:
        """The smallest captured form that holds a row."""
        holding = [form for form in self._graphs if form.holds(row, router_logits, embedded)]
        return min(holding, key=lambda form: form.size, default=None)

    def _is_worth_it(self, form: ShapeBucket, device: torch.device) -> bool:
        """Whether replaying is known to save time and leaves enough memory; if not, `why_not` says why."""
        trials, size = self._trials[form.embedded], (form.embedded, form.tokens)
        is_held_up = trials.is_held_up(form.tokens)
        if is_held_up and size not in self._too_large:
            gradients = 0 if self._state is None else self._state.bytes_of_gradients
            self._too_large[size] = trials.why_too_large(form.tokens, device, gradients)
        if is_held_up:
            self.why_not = self._too_large[size]
            return self.why_not is None
        self._needs_no_graphs(form)
        return False

    def _needs_no_graphs(self, form: ShapeBucket) -> bool:
        """Whether rows of this size are known not to wait for Python; then `why_not` says so."""
        trials = self._trials[form.embedded]
        times = trials.times(form.tokens)
        if times is None or trials.is_held_up(form.tokens) is not False:
            return False
        self.why_not = longer_than_launching(times)
        return True

    def _capture(self, decoder: CapturableDecoder, form: ShapeBucket, device: torch.device) -> bool:
        """Whether the form could be captured."""
        try:
            captured = capture_form(decoder, form, device, self._memory, self.windows)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            cause = what_broke(error)
        else:
            self._graphs[form] = captured
            if self._state is not None:
                self._state.keep_memory()
            return True
        self._graphs.clear()  # only now: the error held what was computed until then
        self._memory = self._memory.after_broken_capture(device)
        self._why_never = self.why_not = f"capture failed ({cause})"
        logger.warning("the step is not captured in CUDA graphs: %s", self._why_never)
        return False


def _device_of(inputs: Tensor | Embedded) -> torch.cuda.device_of:
    return torch.cuda.device_of(inputs.embeds if isinstance(inputs, Embedded) else inputs)
