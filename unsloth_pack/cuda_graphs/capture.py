"""One captured form: its two graphs, how they are captured and replayed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, UntypedStorage, nn

from unsloth_pack.cuda_graphs.flat_adamw import FlatGradients
from unsloth_pack.cuda_graphs.memory import GraphMemory, Token, alias_memory
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder, CastsParameters
from unsloth_pack.cuda_graphs.recomputed_layers import RecomputedLayers, why_not_recomputed
from unsloth_pack.cuda_graphs.shapes import Embedded, ShapeBucket, StaticInputs
from unsloth_pack.kernels.launch import once_differentiable
from unsloth_pack.modules.hooks import HOOKS, is_harmless
from unsloth_pack.modules.walk import Walkable
from unsloth_pack.packed_row.images import BlockForm, BlockRows
from unsloth_pack.packed_row.row import PackedRow

# Parameters that stand in for a decoder's trained ones while its step is captured.


class PlaceholderParams:
    """Replaces the trained parameters of a decoder within its context.

    Autograd remembers the stream on which a parameter was first used, and a capture breaks where that was
    another stream. A stand-in is a new parameter over the same memory, so it was never used before.

    Parameters that layers cast at every call get a stand-in in the dtype that they compute in. `fill` copies
    all of these from the originals in one launch.

    Args:
        dtype: that the decoder computes in.
        memory: owns the copies of cast parameters.
    """

    def __init__(self, decoder: CapturableDecoder, dtype: torch.dtype, memory: GraphMemory):
        modules = list(decoder.modules())
        # By class: to ask it of every module would take a tenth of a capture
        casting = tuple(kind for kind in {*map(type, modules)} if issubclass(kind, CastsParameters))
        cast = {id(p) for m in modules if isinstance(m, casting) for p in m.cast_when_used()}
        # Each parameter's place: the dict of its module, and its name there
        self._places = [(m._parameters, name) for m in modules for name in m._parameters]
        self._stand_ins: dict[int, nn.Parameter] = {}  # by the id of the original
        self._originals: list[Tensor] = []  # of the cast ones
        self._copies: list[Tensor] = []
        for held, name in self._places:
            p = held[name]
            if p is None or not p.requires_grad or id(p) in self._stand_ins:
                continue
            if id(p) in cast and p.dtype != dtype:
                self._originals.append(p.detach())
                self._copies.append(memory.stand_in(len(self._copies), p, dtype))
                self._stand_ins[id(p)] = nn.Parameter(self._copies[-1])
            else:
                self._stand_ins[id(p)] = nn.Parameter(p.detach())
        self._replaced: list[nn.Parameter | None] = []

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What stands in for these trained parameters."""
        return [self._stand_ins[id(p)] for p in parameters]

    def fill(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def __enter__(self) -> None:
        self._replaced = [held[name] for held, name in self._places]
        for (held, name), p in zip(self._places, self._replaced, strict=True):
            held[name] = self._stand_ins.get(id(p), p)

    def __exit__(self, *_: object) -> None:
        for (held, name), p in zip(self._places, self._replaced, strict=True):
            held[name] = p


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
    form: ShapeBucket,
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
        outputs=[alias_memory(x).view(form.tokens, -1) for x in output.tensors],
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
        form: ShapeBucket,
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
        self.stand_ins = PlaceholderParams(decoder, dtype, memory)
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
    return gradients, [None if grad is None else alias_memory(grad) for grad in found[n:]]


# What a graph takes for granted of any module: where its parameters lie, and what its adapters do.

_IS_TRAINED = attrgetter("requires_grad")


class ModuleState:
    """A module as it was when this was made. Graphs that were captured then are right while it matches."""

    def __init__(self, module: Walkable):
        modules = list(module.modules())
        self._module = module
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        self._attributes = [vars(m) for m in modules]
        self._children = [m._modules for m in modules if m._modules]
        self._children_seen = [dict(held) for held in self._children]
        self._holders = [m._parameters for m in modules if m._parameters]
        self._kept_alive = self._parameters()  # so that no other parameter gets the id of one of these
        self._memory: list[UntypedStorage] = []
        self._adapted = [m for m in modules if isinstance(m, BaseTunerLayer)]
        scalings = (getattr(m, "scaling", None) for m in self._adapted)  # IA³ has none
        self._scalings: list[dict[str, float]] = [scaling for scaling in scalings if scaling is not None]
        self._seen = self.look()

    def keep_memory(self) -> None:
        """Keep the memory of the parameters while this lives, even where they get other memory.

        Graphs may be launched before anybody looks whether the parameters lie there still.
        """
        self._memory = [p.untyped_storage() for p in self._kept_alive]

    def matches(self, module: Walkable) -> bool:
        """Whether nothing has changed. Called every step, so it compares little of a module."""
        return self._module is module and self._children == self._children_seen and self.look() == self._seen

    @property
    def has_hooks(self) -> bool:
        """Whether a hook, or a forward that was set on a module, may change what the module computes."""
        hooks = (hook for held in filter(None, self._hooks) for hook in held.values())
        return not all(map(is_harmless, hooks)) or any(map(contains, self._attributes, repeat("forward")))

    def _parameters(self) -> list[Tensor]:
        held = chain.from_iterable(map(dict.values, self._holders))
        return [p for p in held if p is not None]

    def look(self) -> list[list[object]]:
        """Of parameters and adapters, mostly in C: it reads thousands of objects."""
        parameters = self._parameters()
        adapters = [(m._disable_adapters, m._active_adapter, *m.merged_adapters) for m in self._adapted]
        return [
            list(map(id, parameters)),
            list(map(Tensor.data_ptr, parameters)),
            list(map(_IS_TRAINED, parameters)),
            adapters,
            list(chain.from_iterable(map(dict.values, self._scalings))),
        ]


# What a graph takes for granted of a decoder: its parameters, its dropout and its checkpointing.

_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")  # attributes of layers
_DROPOUTS = ("p", "attention_dropout")  # attributes of modules that hold a dropout probability


class DecoderState(ModuleState):
    """A decoder as it was when this was made. It matches, too, where nothing but dropout has changed.

    Attributes:
        bytes_of_gradients: of all trained parameters.
    """

    def __init__(self, decoder: CapturableDecoder):
        self._decoder = decoder
        self._dropouts = [(vars(m), name) for m in decoder.modules() for name in _DROPOUTS if name in vars(m)]
        self._layers = [vars(layer) for layer in decoder.layers]
        self.bytes_of_gradients = sum(
            p.numel() * p.element_size() for p in decoder.parameters() if p.requires_grad
        )
        self._dropouts_seen = self._look_at_dropouts()
        super().__init__(decoder)

    def dropout_matches(self) -> bool:
        """Whether every dropout has the same probability, and is on or off as it was."""
        return self._look_at_dropouts() == self._dropouts_seen

    def why_not_captured(self) -> str | None:
        """Why no row of this step is captured, or None."""
        if not self._decoder.training:
            return "the model is not training"
        if why := why_not_recomputed(self._decoder):
            return why
        return "modules have hooks" if self.has_hooks else None

    def look(self) -> list[list[object]]:
        checkpointing = [_alike(layer.get(name)) for layer in self._layers for name in _CHECKPOINTING]
        return [*super().look(), checkpointing]

    def _look_at_dropouts(self) -> list[tuple[float, bool]]:
        return [(held[name], held["training"]) for held, name in self._dropouts]


def _alike(value: object) -> object:
    """The value; of a partial its parts. TRL's DPO makes these anew in every step: their parts are equal."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else value
