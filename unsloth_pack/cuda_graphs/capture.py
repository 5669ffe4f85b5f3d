"""Capture the step of one shape of row in two graphs, and replay it. Check what graphs assume of a module.

While a step is captured, placeholders replace the trained parameters: autograd remembers the stream on which
a parameter was first used, and a capture fails if that was another stream.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from unsloth_pack.cuda_graphs.checkpointing import RecomputedLayers, why_not_recomputed
from unsloth_pack.cuda_graphs.flat_adamw import FlatGradients
from unsloth_pack.cuda_graphs.memory import GraphMemory, Token, alias_memory, describe_cause
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder, CastsParameters
from unsloth_pack.cuda_graphs.shapes import Embedded, ShapeBucket, StaticInputs
from unsloth_pack.kernels.launch import apply, once_differentiable
from unsloth_pack.modules import HOOKS, Walkable, is_harmless
from unsloth_pack.packed_row.images import BlockRows
from unsloth_pack.packed_row.row import PackedRow

logger = logging.getLogger("unsloth_pack")


class PlaceholderParams:
    """Replace the trained parameters of a decoder, as a context, by new ones over the same memory.

    Parameters that layers cast at every call get a placeholder in the compute `dtype`, which `fill` copies.
    """

    def __init__(self, decoder: CapturableDecoder, dtype: torch.dtype, memory: GraphMemory):
        modules = list(decoder.modules())
        # Checked by class: to check every module would take a tenth of a capture
        casting = tuple(kind for kind in {*map(type, modules)} if issubclass(kind, CastsParameters))
        cast = {id(p) for m in modules if isinstance(m, casting) for p in m.cast_when_used()}
        # Each parameter's place: the dict of its module, and its name there
        self._places = [(m._parameters, name) for m in modules for name in m._parameters]
        self._placeholders: dict[int, nn.Parameter] = {}  # by the id of the original
        self._originals: list[Tensor] = []  # of the cast ones
        self._copies: list[Tensor] = []
        for parameters, name in self._places:
            p = parameters[name]
            if p is None or not p.requires_grad or id(p) in self._placeholders:
                continue
            if id(p) in cast and p.dtype != dtype:
                self._originals.append(p.detach())
                self._copies.append(memory.placeholder(len(self._copies), p, dtype))
                self._placeholders[id(p)] = nn.Parameter(self._copies[-1])
            else:
                self._placeholders[id(p)] = nn.Parameter(p.detach())
        self._replaced: list[nn.Parameter | None] = []

    def get(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the placeholders of trained parameters."""
        return [self._placeholders[id(p)] for p in parameters]

    def fill(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def __enter__(self) -> None:
        self._replaced = [parameters[name] for parameters, name in self._places]
        for (parameters, name), p in zip(self._places, self._replaced, strict=True):
            parameters[name] = self._placeholders.get(id(p), p)

    def __exit__(self, *_: object) -> None:
        for (parameters, name), p in zip(self._places, self._replaced, strict=True):
            parameters[name] = p


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The outputs of a decoder for a row."""

    hidden: Tensor  # `[B, T, C]`, the last hidden state
    router_logits: tuple[Tensor, ...] | None  # `[B * T, experts]` of every layer that routes, if requested

    @property
    def tensors(self) -> list[Tensor]:
        return [self.hidden, *(self.router_logits or ())]

    def static(self) -> list[Tensor]:
        """Return the outputs of a capture, `[tokens, ..]` each."""
        return [alias_memory(x).view(-1, x.shape[-1]) for x in self.tensors]


class _Replayed(torch.autograd.Function):
    """Copy the outputs of the forward graph, `[tokens, ..]`; the backward pass replays the other graph."""

    @staticmethod
    def forward(
        ctx: Any, captured: "CapturedShape", n_tokens: int, *inputs_and_parameters: Tensor
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
        captured: CapturedShape = ctx.captured
        captured.memory.use_up(ctx.token)
        for static, grad in zip(captured.grads, grads, strict=True):
            if static is not None:
                static[: ctx.n_tokens].copy_(grad) if grad is not None else static.zero_()
                static[ctx.n_tokens :].zero_()
        captured.run(captured.backward_graph)
        input_grads = (None if x is None else x[: ctx.n_tokens].clone() for x in captured.input_gradients)
        return None, None, *input_grads, *captured.gradients.copies()


class StaticPass(ABC):
    """A decoder's forward pass over a static row and static inputs, captured by a subclass.

    `windows` are those of the layers, for a shape with blocks.
    """

    def __init__(
        self,
        decoder: CapturableDecoder,
        bucket: ShapeBucket,
        device: torch.device,
        memory: GraphMemory,
        windows: Iterable[int | None] = (),
    ):
        sizes = bucket.tokens, bucket.segments, bucket.longest
        has_blocks = bucket.blocks is not None
        self.row = PackedRow.static(*sizes, device, bucket.axes, has_blocks, bucket.branches)
        self._blocks: dict[int | None, BlockRows] = {}  # by the window of the layers that read them
        if bucket.blocks is not None:
            self._blocks = {window: BlockRows.static(self.row, window, bucket.blocks) for window in windows}
            self._padding = bucket.blocks.padding(self.row.longest)
        # Rotary tables are outside the graphs' pool: later rows read them too
        self._tables = [rotary.for_row(self.row) for rotary in decoder.rotary_tables.values()]
        self.inputs = StaticInputs(bucket.tokens, bucket.embedded, device, memory)
        self.parameters = [p for p in decoder.parameters() if p.requires_grad]
        dtype = bucket.autocast or decoder.get_input_embeddings().weight.dtype
        self._placeholders = PlaceholderParams(decoder, dtype, memory)
        self._recomputed = RecomputedLayers(decoder, memory)
        self._autocast = bucket.autocast
        self._options: dict[str, Any] = {"output_router_logits": True} if bucket.router_logits else {}
        self.memory = memory
        self._peers = decoder.peer_weights
        # The layers of which copies are whole before and after a graph
        self._held: dict[torch.cuda.CUDAGraph, tuple[list[int | None], list[int | None]]] = {}
        self._capture(decoder)
        self._peers.reset()  # nothing was copied in a capture

    @abstractmethod
    def _capture(self, decoder: CapturableDecoder) -> None:
        """Capture the graphs."""

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        peers = self._peers
        peers.join()
        before = [*peers.held]
        try:
            with self.memory.capturing(graph):
                yield
                peers.join()
            self._held[graph] = before, [*peers.held]
        except RuntimeError:
            peers.reset()
            raise

    def run(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph."""
        before, after = self._held[graph]
        self._peers.hold(before)
        graph.replay()
        self._peers.held = [*after]

    def _fill(self, row: PackedRow, inputs: Tensor | Embedded) -> Tensor | list[Tensor]:
        tensors = inputs.by_token(row) if isinstance(inputs, Embedded) else inputs
        self.inputs.fill(tensors, row.n_tokens)
        self.row.fill(row)
        for window, blocks in self._blocks.items():
            blocks.fill(row, window, self.row.n_tokens - 1, self._padding)
        return tensors

    def _forward(self, decoder: CapturableDecoder) -> StepOutput:
        """Run the static row: `[1, tokens, C]` and `[tokens, experts]`."""
        enabled = self._autocast is not None
        autocast = torch.autocast("cuda", dtype=self._autocast, enabled=enabled, cache_enabled=False)
        ids, embeds, deepstack = self.inputs.arguments()
        self._placeholders.fill()
        with autocast, self._placeholders, self._recomputed:
            output = decoder._packed_forward(self.row, ids, embeds, **deepstack, **self._options)
        assert output.last_hidden_state is not None
        # A view drops the last norm's recipe, which would keep the norm's input alive
        hidden = output.last_hidden_state.view_as(output.last_hidden_state)
        return StepOutput(hidden, output.router_logits if self._options else None)


class CapturedShape(StaticPass):
    """The graphs of a decoder's step over rows of a shape, and the static tensors that they read and write.

    They are captured on the current device. After a RuntimeError, by a capture that failed or memory that ran
    out, call `memory.give_back`.
    """

    def _capture(self, decoder: CapturableDecoder) -> None:
        self._leaves = [*self._placeholders.get(self.parameters), *self.inputs.leaves]
        torch.cuda.empty_cache()  # frees the memory of uncaptured steps: the graphs have a pool of their own
        grads = self._warm_up(decoder)
        # Reads row, inputs and parameters, writes `outputs`
        self.forward_graph = torch.cuda.CUDAGraph()
        # Reads `grads` and the saved activations, writes `gradients` and `input_gradients`
        self.backward_graph = torch.cuda.CUDAGraph()
        with self._capturing(self.forward_graph):
            output = self._forward(decoder)
        dtypes = [p.dtype for p in self.parameters] or [torch.float32]
        n = len(self.parameters)
        with self._capturing(self.backward_graph):
            leaf_grads = self._backward(output, grads)
            self.gradients = FlatGradients(leaf_grads[:n], reduce(torch.promote_types, dtypes))
        self.gradients.release_to_pool()
        # `[tokens, ..]`, the last hidden state and the router logits. Like the gradients, they are read right
        # after a replay
        self.outputs = output.static()
        # Of the outputs; None for one that no parameter reaches
        self.grads = [None if grad is None else grad.view(self.row.n_tokens, -1) for grad in grads]
        # `[tokens, C]` each, of the inputs that train
        self.input_gradients = [None if grad is None else alias_memory(grad) for grad in leaf_grads[n:]]

    def launch(self, row: PackedRow, inputs: Tensor | Embedded) -> Tensor | list[Tensor]:
        """Launch the forward pass of a row that fits the shape; return the inputs for `output`."""
        tensors = self._fill(row, inputs)
        self.run(self.forward_graph)
        return tensors

    def output(self, row: PackedRow, inputs: Tensor | list[Tensor]) -> StepOutput:
        """Return the launched outputs, with gradients. Meanwhile autograd visits every parameter."""
        trained = inputs if self.inputs.leaves else ()
        hidden, *router_logits = apply(_Replayed, self, row.n_tokens, *trained, *self.parameters)
        return StepOutput(hidden.view(*row.shape, -1), tuple(router_logits) or None)

    def _backward(self, output: StepOutput, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradients of all parameters and trained inputs; None for unused ones."""
        reached = [(x, grad) for x, grad in zip(output.tensors, grads, strict=True) if grad is not None]
        outputs, output_grads = zip(*reached, strict=True)
        with self._placeholders:  # for layers that are recomputed
            gradients = torch.autograd.grad(outputs, self._leaves, output_grads, allow_unused=True)
        self._recomputed.end_backward()
        return list(gradients)

    def _warm_up(self, decoder: CapturableDecoder) -> list[Tensor | None]:
        """Run the step in the pool of the capture; return zeros for the gradients of its outputs.

        None stands for an output without one, such as the first layer's router logits.
        """
        with self.memory.warming_up():
            output = self._forward(decoder)
            drawn = _random_state(self.row.device)
        grads: list[Tensor | None] = []
        for i, x in enumerate(output.tensors):
            shape = self.row.n_tokens, x.shape[-1], x.dtype, x.device
            grads.append(
                self.memory.rows("gradient", i, *shape).zero_().view_as(x) if x.requires_grad else None
            )
        with self.memory.warming_up():
            self._backward(output, grads)
            if self._recomputed and not torch.equal(drawn, _random_state(self.row.device)):
                raise RuntimeError("layers that are computed again draw random numbers")
            del output
        return grads


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class ModuleState:
    """A snapshot of a module's parameters and adapters. Graphs are valid while it matches."""

    def __init__(self, module: Walkable):
        modules = list(module.modules())
        self._module = module
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        self._attributes = [vars(m) for m in modules]
        self._children = [m._modules for m in modules if m._modules]
        self._children_seen = [dict(children) for children in self._children]
        self._holders = [m._parameters for m in modules if m._parameters]
        self._kept_alive = self._parameters()  # so that no other parameter can get one of their ids
        self._adapted = [m for m in modules if isinstance(m, BaseTunerLayer)]
        self._scalings: list[dict[str, float]] = [getattr(m, "scaling", {}) for m in self._adapted]
        self._seen = self.look()

    def matches(self, module: Walkable) -> bool:
        """True if nothing has changed. Called every step, so it compares little of a module."""
        return self._module is module and self._children == self._children_seen and self.look() == self._seen

    @property
    def has_hooks(self) -> bool:
        """True if a hook, or a forward set on a module, may change the results."""
        hooks = (hook for hooks in filter(None, self._hooks) for hook in hooks.values())
        return not all(map(is_harmless, hooks)) or any(map(contains, self._attributes, repeat("forward")))

    def _parameters(self) -> list[Tensor]:
        return [p for p in chain.from_iterable(map(dict.values, self._holders)) if p is not None]

    def look(self) -> list[list[object]]:
        """Read parameters and adapters, mostly in C: they are thousands of objects."""
        parameters = self._parameters()
        adapters = [(m._disable_adapters, m._active_adapter, *m.merged_adapters) for m in self._adapted]
        return [
            list(map(id, parameters)),
            list(map(Tensor.data_ptr, parameters)),
            list(map(attrgetter("requires_grad"), parameters)),
            adapters,
            list(chain.from_iterable(map(dict.values, self._scalings))),
        ]


_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")  # attributes of layers
_DROPOUTS = ("p", "attention_dropout")  # attributes of modules with a dropout probability


class DecoderState(ModuleState):
    """A snapshot of a decoder, with its checkpointing. It also matches if only dropout has changed."""

    def __init__(self, decoder: CapturableDecoder):
        self._decoder = decoder
        self._dropouts = [(vars(m), name) for m in decoder.modules() for name in _DROPOUTS if name in vars(m)]
        self._layers = [vars(layer) for layer in decoder.layers]
        self.bytes_of_gradients = sum(
            p.numel() * p.element_size() for p in decoder.parameters() if p.requires_grad
        )
        self._dropouts_seen = self._look_at_dropouts()
        super().__init__(decoder)
        # Graphs may be launched before the check for changes, and read this memory
        self._memory = [p.untyped_storage() for p in self._kept_alive]

    def dropout_matches(self) -> bool:
        """True if every dropout has the same probability, and is on or off as before."""
        return self._look_at_dropouts() == self._dropouts_seen

    def drops_nothing(self) -> bool:
        """True if no dropout is on."""
        return not any(p and is_on for p, is_on in self._look_at_dropouts())

    def why_not_captured(self) -> str | None:
        """Explain why no row of this step is captured, or None."""
        if not self._decoder.training:
            return "the model is not training"
        if why := why_not_recomputed(self._decoder):
            return why
        return "modules have hooks" if self.has_hooks else None

    def look(self) -> list[list[object]]:
        checkpointing = [_alike(layer.get(name)) for layer in self._layers for name in _CHECKPOINTING]
        return [*super().look(), checkpointing]

    def _look_at_dropouts(self) -> list[tuple[float, bool]]:
        return [(attributes[name], attributes["training"]) for attributes, name in self._dropouts]


def _alike(value: object) -> object:
    """Return the value, or a partial's parts: TRL's DPO creates equal partials in every step."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else value


class GraphCache:
    """The graphs of one module, by the shape of what they replay. Copies and pickles hold no graphs."""

    def __init__(self, why_never: str | None, what: str, unit: str):
        self.why_not = why_never  # why the last row was not captured
        self.why_never = why_never  # why nothing can be captured, or None
        self._what, self._unit = what, unit  # what they replay and the unit of its size, for messages
        self._graphs: dict[Any, Any] = {}
        self._state: ModuleState | None = None
        self._memory = GraphMemory()

    def let_go(self, module: Walkable) -> None:
        """Drop the graphs of a changed module, with their memory."""
        if self._state is not None and not self._state.matches(module):
            self._graphs.clear()
            self._state = None

    def _describe(self, sizes: Iterable[int]) -> str:
        if not self._graphs:
            return f"not captured: {self.why_not or 'no shape of row has come often enough yet'}"
        shown = ", ".join(map(str, sorted({*sizes})))
        return f"captured for {len(self._graphs)} shapes of rows, of {shown} {self._unit}"

    def _try(self, bucket: object, capture: Callable[[], object], device: torch.device) -> bool:
        """Capture a shape; after a failure nothing is captured any more."""
        try:
            self._graphs[bucket] = capture()
            return True
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            cause = describe_cause(error)
        # The error has gone, which held tensors of the capture
        self._graphs.clear()
        self._memory = self._memory.after_broken_capture(device)
        self.why_never = self.why_not = f"capture failed ({cause})"
        logger.warning("the %s is not captured in CUDA graphs: %s", self._what, self.why_never)
        return False
