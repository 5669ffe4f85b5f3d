"""One captured form: its two graphs, how they are captured and replayed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.graphs.flat_gradients import FlatGradients
from unsloth_pack.graphs.inputs import Embedded, StaticInputs
from unsloth_pack.graphs.memory import GraphMemory, Token, borrowed
from unsloth_pack.graphs.protocols import CapturableDecoder
from unsloth_pack.graphs.recomputed_layers import RecomputedLayers
from unsloth_pack.graphs.row_form import RowForm
from unsloth_pack.graphs.stand_ins import StandIns
from unsloth_pack.kernels.backward import once_differentiable
from unsloth_pack.row.block_rows import BlockForm, BlockRows
from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True, eq=False)
class StepOutput:
    """What a decoder makes of a row.

    Args:
        hidden: `[B, T, C]`, the last hidden state.
        router_logits: `[B * T, experts]` of every layer that routes; None where they were not asked for.
    """

    hidden: Tensor
    router_logits: tuple[Tensor, ...] | None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.hidden, *(self.router_logits or ())]


@dataclass(frozen=True, eq=False)
class CapturedForm:
    """The graphs of a form, and the static tensors that they read and write.

    Args:
        memory: what the graphs compute lies there.
        forward_graph: reads `row`, `inputs` and the parameters, writes `outputs`.
        backward_graph: reads `grads` and what the forward graph has left, writes `gradients` and
            `input_gradients`.
        row: a static row of the form's sizes.
        blocks: of the row, with what fills them up; None where a form has none.
        outputs: `[tokens, ..]`, the last hidden state, and the router logits if these were asked for. As the
            gradients, they are read right after a replay.
        grads: their gradients; None for an output that no parameter reaches.
        parameters: the trained ones.
        gradients: of the parameters.
        input_gradients: `[tokens, C]` each, of `inputs.leaves`; None where none reaches one.
        kept_alive: owns memory that the graphs read and that nothing else here owns.
    """

    memory: GraphMemory
    forward_graph: torch.cuda.CUDAGraph
    backward_graph: torch.cuda.CUDAGraph
    row: PackedRow
    blocks: "_StaticBlocks | None"
    inputs: StaticInputs
    outputs: list[Tensor]
    grads: list[Tensor | None]
    has_router_logits: bool
    parameters: list[nn.Parameter]
    gradients: FlatGradients
    input_gradients: list[Tensor | None]
    kept_alive: tuple[object, ...]

    def launch(self, row: PackedRow, inputs: Tensor | Embedded) -> Tensor | list[Tensor]:
        """Have the device compute what the decoder makes of a row that the form holds.

        Args:
            inputs: token ids `[B, T]` int64, or embeddings.

        Returns:
            What `output` takes.
        """
        given = inputs.by_token(row) if isinstance(inputs, Embedded) else inputs
        self.inputs.fill(given, row.n_tokens)
        self.row.fill(row)
        if self.blocks is not None:
            self.blocks.fill(row)
        self.forward_graph.replay()
        return given

    def output(self, row: PackedRow, given: Tensor | list[Tensor]) -> StepOutput:
        """What was launched, with gradients. Autograd looks at every parameter for it meanwhile."""
        trained = given if self.inputs.leaves else ()
        hidden, *router_logits = _Replayed.apply(self, row.n_tokens, *trained, *self.parameters)
        return StepOutput(
            hidden.view(*row.shape, -1), tuple(router_logits) if self.has_router_logits else None
        )


class _Replayed(torch.autograd.Function):
    """The outputs that the forward graph has left, `[tokens, ..]`."""

    @staticmethod
    def forward(
        ctx: Any, captured: CapturedForm, n_tokens: int, *inputs_and_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.captured, ctx.n_tokens, ctx.token = captured, n_tokens, Token()
        ctx.set_materialize_grads(False)
        captured.memory.fill(ctx.token)
        copies = tuple(output[:n_tokens].clone() for output in captured.outputs)
        reached = zip(copies, captured.grads, strict=True)
        ctx.mark_non_differentiable(*(copied for copied, grad in reached if grad is None))
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        captured: CapturedForm = ctx.captured
        captured.memory.use_up(ctx.token)
        for static, grad in zip(captured.grads, grads, strict=True):
            if static is not None:
                static[: ctx.n_tokens].copy_(grad) if grad is not None else static.zero_()
                static[ctx.n_tokens :].zero_()
        captured.backward_graph.replay()
        of_inputs = (None if x is None else x[: ctx.n_tokens].clone() for x in captured.input_gradients)
        return None, None, *of_inputs, *captured.gradients.copies()


class _StaticBlocks:
    """The blocks of a static row, for layers of every window.

    Args:
        windows: of the layers.
    """

    def __init__(self, row: PackedRow, form: BlockForm, windows: Iterable[int | None]):
        self._spare, self._padding = row.n_tokens - 1, form.padding(row.longest)
        self._by_window = {window: BlockRows.static(row, window, form) for window in windows}

    def fill(self, row: PackedRow) -> None:
        """Make them those of `row`."""
        for window, blocks in self._by_window.items():
            blocks.fill(row, window, self._spare, self._padding)


def capture_form(
    decoder: CapturableDecoder,
    form: RowForm,
    device: torch.device,
    memory: GraphMemory,
    windows: Iterable[int | None] = (),
) -> CapturedForm:
    """Capture the forward and backward pass of a decoder over rows of a form.

    Args:
        device: the decoder's, which is the current one.
        windows: of its layers; only for a form with blocks.

    Raises:
        RuntimeError: the capture broke, or memory ran out. `memory` then has to be given back.
    """
    step = _StaticStep(decoder, form, device, memory, windows)
    tables = _make_rotary_tables(decoder, step.row)
    torch.cuda.empty_cache()  # of what uncaptured steps held: the graphs have memory of their own
    grads = _warm_up(step, memory)
    forward_graph, backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    output = _capture_forward(step, forward_graph, memory)
    gradients, input_gradients = _capture_backward(step, output, grads, backward_graph, memory)
    return CapturedForm(
        memory=memory,
        forward_graph=forward_graph,
        backward_graph=backward_graph,
        row=step.row,
        blocks=step.blocks,
        inputs=step.inputs,
        outputs=[borrowed(x).view(form.tokens, -1) for x in output.tensors],
        grads=[None if grad is None else grad.view(form.tokens, -1) for grad in grads],
        has_router_logits=output.router_logits is not None,
        parameters=step.parameters,
        gradients=gradients,
        input_gradients=input_gradients,
        kept_alive=(step.stand_ins, step.recomputed, tables),
    )


class _StaticStep:
    """A decoder's step over static tensors: what is run to warm up, and again to be captured."""

    def __init__(
        self,
        decoder: CapturableDecoder,
        form: RowForm,
        device: torch.device,
        memory: GraphMemory,
        windows: Iterable[int | None],
    ):
        sizes = form.tokens, form.segments, form.longest
        self.row = PackedRow.static(*sizes, device, form.axes, form.blocks is not None)
        self.blocks = None if form.blocks is None else _StaticBlocks(self.row, form.blocks, windows)
        self.inputs = StaticInputs(form.tokens, form.embedded, device, memory)
        self.parameters = [p for p in decoder.parameters() if p.requires_grad]
        dtype = form.autocast or decoder.get_input_embeddings().weight.dtype
        self.stand_ins = StandIns(decoder, dtype, memory)
        self.recomputed = RecomputedLayers(decoder, memory)
        self._leaves = [*self.stand_ins.of(self.parameters), *self.inputs.leaves]
        self._decoder = decoder
        self._autocast = form.autocast
        self._asked: dict[str, Any] = {"output_router_logits": True} if form.router_logits else {}

    def forward(self) -> StepOutput:
        """Of the static row, `[1, tokens, C]` and `[tokens, experts]`."""
        autocast = torch.autocast(
            "cuda", dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=False
        )
        ids, embeds, added = self.inputs.arguments()
        self.stand_ins.fill()
        with autocast, self.stand_ins, self.recomputed:
            made = self._decoder._packed_forward(self.row, ids, embeds, **added, **self._asked)
        assert made.last_hidden_state is not None
        # A view, without the recipe that the last norm leaves on it: that would keep the norm's input, too
        hidden = made.last_hidden_state.view_as(made.last_hidden_state)
        return StepOutput(hidden, made.router_logits if self._asked else None)

    def backward(self, output: StepOutput, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all parameters and trained inputs, None where none reaches one."""
        reached = [(x, grad) for x, grad in zip(output.tensors, grads, strict=True) if grad is not None]
        outputs, their_grads = zip(*reached, strict=True)
        with self.stand_ins:  # for layers that are computed again
            found = torch.autograd.grad(outputs, self._leaves, their_grads, allow_unused=True)
        self.recomputed.end_backward()
        return list(found)


def _make_rotary_tables(decoder: CapturableDecoder, row: PackedRow) -> list[tuple[Tensor, Tensor] | None]:
    """The tables that the graphs will read, outside of their memory: later rows read them too."""
    for tables in decoder.rotary_tables.values():
        tables.for_row(row)
    return [tables.static_table for tables in decoder.rotary_tables.values()]


def _warm_up(step: _StaticStep, memory: GraphMemory) -> list[Tensor | None]:
    """Run the step in the memory where it is captured next; the gradients of its outputs, zeros for now."""
    with memory.warming_up():
        output = step.forward()
        drawn = _random_state(step.row.device)
    grads = _gradients_of(output, memory)
    with memory.warming_up():
        step.backward(output, grads)
        if step.recomputed and not torch.equal(drawn, _random_state(step.row.device)):
            raise RuntimeError("layers that are computed again draw random numbers")
        del output
    return grads


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _gradients_of(output: StepOutput, memory: GraphMemory) -> list[Tensor | None]:
    """None where no gradient goes on from an output: that of the first layer's router, perhaps."""
    return [memory.output_gradient(i, x) if x.requires_grad else None for i, x in enumerate(output.tensors)]


def _capture_forward(step: _StaticStep, graph: torch.cuda.CUDAGraph, memory: GraphMemory) -> StepOutput:
    with memory.capturing(graph):
        return step.forward()


def _capture_backward(
    step: _StaticStep,
    output: StepOutput,
    grads: Sequence[Tensor | None],
    graph: torch.cuda.CUDAGraph,
    memory: GraphMemory,
) -> tuple[FlatGradients, list[Tensor | None]]:
    """The gradients of the parameters, and those of the inputs."""
    dtypes = [p.dtype for p in step.parameters] or [torch.float32]
    with memory.capturing(graph):
        found = step.backward(output, grads)
        n = len(step.parameters)
        gradients = FlatGradients(found[:n], reduce(torch.promote_types, dtypes))
    gradients.lend_memory()
    return gradients, [None if grad is None else borrowed(grad) for grad in found[n:]]
