"""One captured form: its two graphs, how they are captured and replayed."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.graphs.flat_gradients import FlatGradients
from unsloth_pack.graphs.memory import GraphMemory, Token
from unsloth_pack.graphs.protocols import CapturableDecoder
from unsloth_pack.graphs.row_form import RowForm
from unsloth_pack.graphs.stand_ins import StandIns
from unsloth_pack.kernels.backward import once_differentiable
from unsloth_pack.row.packed_row import PackedRow

_WARM_UPS = 2


@dataclass(frozen=True, eq=False)
class CapturedForm:
    """The graphs of a form, and the static tensors that they read and write.

    Args:
        memory: what the graphs compute lies there.
        forward_graph: reads `row`, `input_ids` and the parameters, writes `hidden`.
        backward_graph: reads `grad` and what the forward graph has left, writes `gradients`.
        row: a static row of the form's sizes.
        input_ids: `[1, tokens]` int64.
        hidden: `[1, tokens, C]`, the last hidden state.
        grad: `[1, tokens, C]`, the gradient of `hidden`.
        parameters: the trained ones.
        gradients: of the parameters.
        kept_alive: owns memory that the graphs read and that nothing else here owns.
    """

    memory: GraphMemory
    forward_graph: torch.cuda.CUDAGraph
    backward_graph: torch.cuda.CUDAGraph
    row: PackedRow
    input_ids: Tensor
    hidden: Tensor
    grad: Tensor
    parameters: list[nn.Parameter]
    gradients: FlatGradients
    kept_alive: tuple[object, ...]

    def replay(self, row: PackedRow, input_ids: Tensor) -> Tensor:
        """The last hidden state `[B, T, C]` of a row that the form holds, with a gradient.

        Args:
            input_ids: `[B, T]` int64.
        """
        n_tokens = row.n_tokens
        self.input_ids[0, :n_tokens].copy_(input_ids.reshape(-1))
        self.row.fill(row)
        self.forward_graph.replay()  # first of all: autograd looks at every parameter for its node
        return _Replayed.apply(self, n_tokens, *self.parameters).view(*row.shape, -1)


class _Replayed(torch.autograd.Function):
    """The last hidden state that the forward graph has left, `[tokens, C]`."""

    @staticmethod
    def forward(ctx: Any, captured: CapturedForm, n_tokens: int, *parameters: nn.Parameter) -> Tensor:
        ctx.captured, ctx.n_tokens, ctx.token = captured, n_tokens, Token()
        captured.memory.fill(ctx.token)
        return captured.hidden[0, :n_tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        captured: CapturedForm = ctx.captured
        captured.memory.use_up(ctx.token)
        captured.grad[0, : ctx.n_tokens].copy_(grad)
        captured.grad[0, ctx.n_tokens :].zero_()
        captured.backward_graph.replay()
        return None, None, *captured.gradients.copies()


def capture_form(
    decoder: CapturableDecoder, form: RowForm, device: torch.device, memory: GraphMemory
) -> CapturedForm:
    """Capture the forward and backward pass of a decoder over rows of a form.

    Args:
        device: the decoder's, which is the current one.

    Raises:
        RuntimeError: the capture broke, or memory ran out. `memory` then has to be given back.
    """
    step = _StaticStep(decoder, form, device)
    tables = _make_rotary_tables(decoder, step.row)
    torch.cuda.empty_cache()  # of what uncaptured steps held: the graphs have memory of their own
    grad = _warm_up(step, memory)
    forward_graph, backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    hidden = _capture_forward(step, forward_graph, memory)
    gradients = _capture_backward(step, hidden, grad, backward_graph, memory)
    return CapturedForm(
        memory=memory,
        forward_graph=forward_graph,
        backward_graph=backward_graph,
        row=step.row,
        input_ids=step.input_ids,
        hidden=hidden.detach(),
        grad=grad,
        parameters=step.parameters,
        gradients=gradients,
        kept_alive=(step.stand_ins, tables),
    )


class _StaticStep:
    """A decoder's step over static tensors: what is run to warm up, and again to be captured."""

    def __init__(self, decoder: CapturableDecoder, form: RowForm, device: torch.device):
        self.row = PackedRow.static(form.tokens, form.segments, form.longest, device)
        self.input_ids = torch.zeros(1, form.tokens, dtype=torch.int64, device=device)
        self.parameters = [p for p in decoder.parameters() if p.requires_grad]
        self.stand_ins = StandIns(decoder, form.autocast or decoder.get_input_embeddings().weight.dtype)
        self._leaves = self.stand_ins.of(self.parameters)
        self._decoder = decoder
        self._autocast = form.autocast

    def forward(self) -> Tensor:
        """The last hidden state `[1, tokens, C]`."""
        autocast = torch.autocast(
            "cuda", dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=False
        )
        with autocast, self.stand_ins:
            hidden = self._decoder._packed_forward(self.row, self.input_ids, None).last_hidden_state
        assert hidden is not None
        return hidden

    def backward(self, hidden: Tensor, grad: Tensor) -> list[Tensor | None]:
        """The gradients of all parameters, None where none reaches one."""
        return list(torch.autograd.grad(hidden, self._leaves, grad, allow_unused=True))


def _make_rotary_tables(decoder: CapturableDecoder, row: PackedRow) -> list[tuple[Tensor, Tensor] | None]:
    """The tables that the graphs will read, outside of their memory: later rows read them too."""
    for tables in decoder.rotary_tables.values():
        tables.for_row(row)
    return [tables.static_table for tables in decoder.rotary_tables.values()]


def _warm_up(step: _StaticStep, memory: GraphMemory) -> Tensor:
    """Run the step in the memory where it is captured next; the gradient of its output, zeros for now."""
    with memory.warming_up():
        for _ in range(_WARM_UPS):
            hidden = step.forward()
            step.backward(hidden, torch.zeros_like(hidden))
        grad = torch.zeros_like(hidden)
        del hidden
    return grad


def _capture_forward(step: _StaticStep, graph: torch.cuda.CUDAGraph, memory: GraphMemory) -> Tensor:
    with memory.capturing(graph):
        return step.forward()


def _capture_backward(
    step: _StaticStep, hidden: Tensor, grad: Tensor, graph: torch.cuda.CUDAGraph, memory: GraphMemory
) -> FlatGradients:
    dtype = reduce(torch.promote_types, (p.dtype for p in step.parameters))
    with memory.capturing(graph):
        return FlatGradients(step.backward(hidden, grad), dtype)
