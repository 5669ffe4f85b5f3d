"""Capture passes without gradients: of a teacher or reference of the same weights, and of an evaluation."""

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.capture import DecoderState, GraphCache, StaticPass, StepOutput
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder
from unsloth_pack.cuda_graphs.shapes import Embedded, ShapeBucket
from unsloth_pack.packed_row.row import PackedRow

_MAX_STATES = 3  # of a decoder in a shape


class ForwardPass(StaticPass):
    """The graph of a pass without gradients, as of a teacher of the same weights, or in evaluation."""

    def _capture(self, decoder: CapturableDecoder) -> None:
        self._state = DecoderState(decoder)
        self._graph = torch.cuda.CUDAGraph()
        with self.memory.warming_up():
            self._forward(decoder)
        with self._capturing(self._graph):
            self._outputs = self._forward(decoder).static()

    def matches(self, decoder: CapturableDecoder) -> bool:
        """True if the decoder is as it was when the pass was captured."""
        return self._state.matches(decoder) and self._state.dropout_matches()

    def replay(self, row: PackedRow, inputs: Tensor | Embedded) -> StepOutput:
        """Compute a row that fits the shape."""
        self._fill(row, inputs)
        self.run(self._graph)
        hidden, *router_logits = (output[: row.n_tokens].clone() for output in self._outputs)
        return StepOutput(hidden.view(*row.shape, -1), tuple(router_logits) or None)


class ForwardGraphs(GraphCache):
    """The graphs of passes without gradients, for each shape of row and state of the decoder.

    Their memory is their own: they run while a step waits for its backward pass, as under TRL's DPO.
    """

    def __init__(self) -> None:
        super().__init__(None, "forward pass", "tokens")
        self._graphs: dict[tuple[ShapeBucket, int], ForwardPass]

    def find(self, decoder: CapturableDecoder, bucket: ShapeBucket) -> ForwardPass | None:
        """Return the graph of a shape for the decoder as it is now."""
        graphs = (self._graphs.get((bucket, number)) for number in range(_MAX_STATES))
        return next((each for each in graphs if each is not None and each.matches(decoder)), None)

    def capture(
        self,
        decoder: CapturableDecoder,
        bucket: ShapeBucket,
        device: torch.device,
        windows: Collection[int | None],
    ) -> ForwardPass | None:
        """Capture a shape for the decoder as it is now, unless it had too many states."""
        number = sum(other == bucket for other, _ in self._graphs)
        if self.why_never is not None or number == _MAX_STATES:
            return None
        capture = partial(ForwardPass, decoder, bucket, device, self._memory, windows)
        return self._graphs[bucket, number] if self._try((bucket, number), capture, device) else None
