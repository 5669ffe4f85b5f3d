"""The captured step: a decoder's forward and backward over a packed row, replayed as two CUDA graphs.

On a small model a step waits for Python and for thousands of kernel launches. A graph launches them all at
once. It lives inside the decoder, so every trainer gets it: the first rows of a form run as usual, then one
is captured, and later ones are copied into its static buffers and replayed.

A form is the number of tokens, of documents and of the longest document, each rounded up: the row is padded
with a document of its own that no gradient reaches, `cu_seqlens` with empty documents. What a graph cannot
hold runs as usual, and `StepGraphs.why_not` says why.
"""

import logging
from collections import Counter
from functools import reduce
from itertools import chain
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unsloth_pack.graphs.memory import GraphMemory, Token
from unsloth_pack.graphs.row_form import RowForm
from unsloth_pack.modules.hooks import HOOKS
from unsloth_pack.row.packed_row import PackedRow

_ROWS_BEFORE_CAPTURE = 2  # of a form, so that kernels are compiled and a form that comes once costs nothing
_WARM_UPS = 2
_MOST_FORMS = 12
_WASTE_ALLOWED = 1.25  # tokens computed for a token of a common form, before that form is captured too
_PAYS_BELOW = 5e11  # tokens x parameters of a layer: above, the GPU computes longer than Python launches
_MOST_TRAINED = 200_000_000  # parameters whose gradients are held once more
_DROPOUTS = ("p", "attention_dropout")  # where modules hold the probability that they draw with

logger = logging.getLogger("unsloth_pack")


class StepGraphs:
    """The graphs of one decoder, one pair for each form of row.

    Args:
        why_never: why no row of this model is captured, known when it is patched; None where some may be.
    """

    def __init__(self, why_never: str | None):
        self.why_not = why_never
        self._why_never = why_never
        self._rows_seen: Counter[RowForm] = Counter()
        self._graphs: dict[RowForm, _CapturedForm] = {}
        self._state: _DecoderState | None = None
        self._memory = GraphMemory()

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepGraphs":
        return StepGraphs(self._why_never)

    def __getstate__(self) -> dict[str, Any]:
        return {"why_never": self._why_never}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["why_never"])

    def __str__(self) -> str:
        if self._graphs:
            sizes = sorted({form.tokens for form in self._graphs})
            return f"captured for {len(self._graphs)} forms of rows, of {', '.join(map(str, sizes))} tokens"
        return f"not captured: {self.why_not or 'no form of row has come often enough yet'}"

    def run(self, decoder: Any, row: PackedRow, input_ids: Tensor | None) -> Tensor | None:
        """The last hidden state `[B, T, C]` of a row, or None where it has to run uncaptured.

        Args:
            decoder: a `FastDecoder`.
            row: on a CUDA device.
            input_ids: `[B, T]`, or None where embeddings came in.
        """
        if self._why_never is not None or input_ids is None or not torch.is_grad_enabled():
            return None
        state = self._state
        if state is None or not state.holds(decoder):
            state = self._renewed(decoder)
        self.why_not = state.why_not_captured(row)
        if self.why_not is not None:
            return None
        if not state.drops_alike():  # asked only now: evaluation and probes turn dropout off for a while
            self._renewed(decoder)
        if self._memory.is_awaited:
            self.why_not = "the row before has not been through its backward pass yet"
            return None
        with torch.cuda.device_of(input_ids):  # the current device is captured, which may be another
            captured = self._graphs_for(decoder, row)
        return None if captured is None else captured.replay(row, input_ids)

    def _renewed(self, decoder: Any) -> "_DecoderState":
        self._graphs.clear()
        self._state = _DecoderState(decoder)
        return self._state

    def _graphs_for(self, decoder: Any, row: PackedRow) -> "_CapturedForm | None":
        """Graphs of the row's own form, else of any that holds it: waste costs less than launches."""
        form = RowForm.of(row)
        self._rows_seen[form] += 1
        holding = [other for other in self._graphs if other.holds(row)]
        nearest = min(holding, key=lambda other: (other.tokens, other.longest, other.segments), default=None)
        has_room = len(self._graphs) < _MOST_FORMS
        is_common = self._rows_seen[form] > _ROWS_BEFORE_CAPTURE
        if nearest is None:
            worth_it = is_common or bool(self._graphs)  # kernels are compiled once anything is captured
        else:
            worth_it = is_common and nearest.tokens > _WASTE_ALLOWED * form.tokens
        if has_room and worth_it:
            return self._capture(decoder, form, row.device)
        return None if nearest is None else self._graphs[nearest]

    def _capture(self, decoder: Any, form: RowForm, device: torch.device) -> "_CapturedForm | None":
        try:
            captured = _CapturedForm(decoder, form, device, self._memory)
        except RuntimeError as error:  # out of memory among them
            cause = _first_cause(error)
        else:
            self._graphs[form] = captured
            return captured
        self._graphs.clear()  # only now: the error held what was computed until then
        self._memory.give_back()
        self._memory = GraphMemory()
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())  # a broken capture leaves it capturing
        self._why_never = self.why_not = f"capture failed ({cause})"
        logger.warning("the step is not captured in CUDA graphs: %s", self._why_never)
        return None


class _CapturedForm:
    """Two graphs and the static tensors that they read and write."""

    def __init__(self, decoder: Any, form: RowForm, device: torch.device, memory: GraphMemory):
        self.row = PackedRow.static(form.tokens, form.segments, form.longest, device)
        self.input_ids = torch.zeros(1, form.tokens, dtype=torch.int64, device=device)
        self.memory = memory
        self.parameters = [p for p in decoder.parameters() if p.requires_grad]
        computed_in = form.autocast or decoder.get_input_embeddings().weight.dtype
        stand_ins = _StandIns(decoder, computed_in)
        leaves = stand_ins.of(self.parameters)
        computes = {"dtype": form.autocast, "enabled": form.autocast is not None, "cache_enabled": False}

        def forward() -> Tensor:
            with torch.autocast("cuda", **computes), stand_ins:
                return decoder._packed_forward(self.row, self.input_ids, None).last_hidden_state

        def backward(hidden: Tensor, grad: Tensor) -> list[Tensor | None]:
            return list(torch.autograd.grad(hidden, leaves, grad, allow_unused=True))

        for tables in decoder.rotary_tables.values():
            tables.for_row(self.row)  # kept for later rows: see `memory`
        torch.cuda.empty_cache()  # what uncaptured steps held: the graphs have memory of their own
        with memory.warming_up():
            for _ in range(_WARM_UPS):
                hidden = forward()
                backward(hidden, torch.zeros_like(hidden))
            self.grad = torch.zeros_like(hidden)
            del hidden

        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with memory.capturing(self.forward_graph):
            hidden = forward()
        with memory.capturing(self.backward_graph):
            grads = backward(hidden, self.grad)
            self.used = [grad is not None for grad in grads]
            self.flat_grads = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
        self.hidden = hidden.detach()
        self._read_by_graphs = stand_ins, [tables.static_table for tables in decoder.rotary_tables.values()]
        self.shapes = [p.shape for p, used in zip(self.parameters, self.used, strict=True) if used]
        self.sizes = [shape.numel() for shape in self.shapes]

    def replay(self, row: PackedRow, input_ids: Tensor) -> Tensor:
        n_tokens = row.n_tokens
        self.input_ids[0, :n_tokens].copy_(input_ids.reshape(-1))
        self.row.fill(row)
        return _Replay.apply(self, n_tokens, *self.parameters).view(*row.shape, -1)

    def gradients(self) -> list[Tensor | None]:
        """A copy of every parameter's gradient: the next replay overwrites the originals."""
        dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters))
        parts = iter(self.flat_grads.to(dtype, copy=True).split(self.sizes))
        shapes = iter(self.shapes)
        return [next(parts).view(next(shapes)) if used else None for used in self.used]


class _StandIns:
    """Takes the place of the trained parameters within its context.

    Autograd remembers on which stream a parameter was first used, which breaks a capture where that was
    another: a stand-in over the same memory was never used before. What layers cast at every use stands in as
    a copy in the dtype that they compute in, cast for all in one launch.
    """

    def __init__(self, decoder: Any, dtype: torch.dtype):
        modules = list(decoder.modules())
        cast = {id(p) for m in modules if hasattr(m, "cast_when_used") for p in m.cast_when_used()}
        self._places = [(m._parameters, name) for m in modules for name in m._parameters]
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        for held, name in self._places:
            p = held[name]
            if p is None or not p.requires_grad or id(p) in self._stand_ins:
                continue
            if id(p) in cast and p.dtype != dtype:
                self._originals.append(p.detach())
                self._copies.append(torch.empty_like(p, dtype=dtype, requires_grad=False))
                self._stand_ins[id(p)] = nn.Parameter(self._copies[-1])
            else:
                self._stand_ins[id(p)] = nn.Parameter(p.detach())
        self._replaced: list[nn.Parameter] = []

    def of(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return [self._stand_ins[id(p)] for p in parameters]

    def __enter__(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)
        self._replaced = [held[name] for held, name in self._places]
        for (held, name), p in zip(self._places, self._replaced, strict=True):
            held[name] = self._stand_ins.get(id(p), p)

    def __exit__(self, *_: object) -> None:
        for (held, name), p in zip(self._places, self._replaced, strict=True):
            held[name] = p


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, captured, n_tokens, *parameters):
        captured.forward_graph.replay()
        ctx.captured, ctx.n_tokens, ctx.token = captured, n_tokens, Token()
        captured.memory.fill(ctx.token)
        return captured.hidden[0, :n_tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        captured = ctx.captured
        captured.memory.use_up(ctx.token)
        captured.grad[0, : ctx.n_tokens].copy_(grad)
        captured.grad[0, ctx.n_tokens :].zero_()
        captured.backward_graph.replay()
        return None, None, *captured.gradients()


class _DecoderState:
    """What a graph takes for granted of a decoder: where its parameters lie and what its modules do."""

    def __init__(self, decoder: Any):
        modules = list(decoder.modules())
        self._decoder = decoder
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        self._children = [m._modules for m in modules if m._modules]
        self._parameters = [(m._parameters, name) for m in modules for name in m._parameters]
        self._adapted = [m for m in modules if isinstance(m, BaseTunerLayer)]
        self._scalings = [m.scaling for m in self._adapted if hasattr(m, "scaling")]
        self._dropouts = [(vars(m), name) for m in modules for name in _DROPOUTS if name in vars(m)]
        self._layer_size = sum(p.numel() for p in decoder.layers[0].parameters())
        self._n_trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
        self._seen, self._dropped = self._look(), self._look_at_dropouts()

    def holds(self, decoder: Any) -> bool:
        """Whether nothing has changed. Called every step, so it compares little of each module."""
        return self._decoder is decoder and self._look() == self._seen

    def drops_alike(self) -> bool:
        """Whether dropout is as it was."""
        return self._look_at_dropouts() == self._dropped

    def why_not_captured(self, row: PackedRow) -> str | None:
        if not self._decoder.training:
            return "the model is not training"
        plan = self._decoder.recompute_plan
        checkpointed = getattr(self._decoder.layers[0], "gradient_checkpointing", False)
        if checkpointed and (plan is None or plan.n_recomputed):
            return "gradient checkpointing"
        if row.n_tokens * self._layer_size > _PAYS_BELOW:
            return "the GPU computes longer than Python launches"
        if self._n_trained > _MOST_TRAINED:
            return f"{self._n_trained:,} parameters are trained"
        if any(self._hooks):
            return "modules have hooks"
        return None

    def _look(self) -> list[Any]:
        parameters = [held[name] for held, name in self._parameters]
        look = [(p.data_ptr(), p.requires_grad) for p in parameters if p is not None]
        adapters = [(m._disable_adapters, m._active_adapter, *m.merged_adapters) for m in self._adapted]
        scalings, children = (
            list(chain.from_iterable(map(dict.values, dicts))) for dicts in (self._scalings, self._children)
        )
        return [look, adapters, scalings, children]

    def _look_at_dropouts(self) -> list[tuple[float, bool]]:
        return [(held[name], held["training"]) for held, name in self._dropouts]


def _first_cause(error: BaseException) -> str:
    """What went wrong first: ending the capture that it broke raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
