"""Estimate the GPU memory of training from the sizes of a model, whose weights may be on the meta device.

A step is at its peak in one of four moments:

                          weights, moments | activations       | beside
    loss                         x         | all that are kept | a chunk of logits, gradients in float32
    backward, last layer         x         | all that are kept | what one layer computes
    backward, first layer        x         | those of a layer  | what one layer computes, all gradients
    update                       x         |                   | all gradients, and copies that join them

A recomputed layer keeps its input alone, and all of its activations while its backward pass runs.
`tests/memory/test_estimate.py` compares the sum with measured peaks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.kernels.head import max_chunk_rows
from unsloth_pack.layers.layer import GateAndUpPlan
from unsloth_pack.lora.expert_stacks import STACKS, get_stored_stack, is_experts
from unsloth_pack.lora.mlp import tile_length
from unsloth_pack.memory.checkpointing import USABLE, CheckpointingMode
from unsloth_pack.memory.layer_sizes import LayerSizes
from unsloth_pack.modules import base_of

CONTEXT = 2**29  # bytes of CUDA's own, beside torch's
# Bytes of a weight with its scales; those of NF4 are in 8 bits, for 64 weights each
_QUANTISED = {"nf4": 0.5 + 1 / 64 + 4 / 2**14, "int8": 1.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
_MOMENTS = {  # the first name that an optimizer's contains; others have two
    "galore": 0, "apollo": 0, "lomo": 0, "sgd": 0, "adafactor": 0,
    "lion": 1, "adagrad": 1, "rmsprop": 1, "ademamix": 3,
}  # fmt: skip
_JOINED = 2  # times the gradients are there in an update, which joins them
_GATHERED = 3  # layers that FSDP2 holds whole. From peers it is two, but measured peaks are as high


@dataclass(frozen=True)
class StepSettings:
    """How a model trains, as far as its memory goes."""

    tokens: int  # of a micro-batch
    dtype: torch.dtype  # of activations
    checkpointing: CheckpointingMode = False
    weights: str | None = None  # the frozen layers: "nf4", "int8", "fp8", or None for their own dtype
    experts: str | None = None  # those of the layers that are in another form: "mxfp4"
    optimizer: str = "adamw_torch_fused"
    accumulates: bool = False  # gradients of several micro-batches
    on_host: bool = False  # the moments
    shards: int = 1  # processes that each hold a part of the layers' weights

    def moment_bytes(self, width: int) -> float:
        """Return the bytes of the optimizer's state for each element of a weight of `width` bytes."""
        if self.on_host or self.optimizer.startswith("paged"):
            return 0
        number = next((n for name, n in _MOMENTS.items() if name in self.optimizer), 2)
        bits = {"8bit": 8.25, "4bit": 4.25}  # with their scales
        own = next((n / 8 for name, n in bits.items() if name in self.optimizer), width)
        return number * own


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one GPU, as torch counts allocated memory."""

    weights: int  # frozen
    trained: int
    moments: int
    gradients: int
    activations: int  # kept from the forward to the backward pass
    loss: int
    peak: int

    @property
    def at_rest(self) -> int:
        """What is there between steps."""
        return self.weights + self.trained + self.moments


def estimate_memory(model: Any, step: StepSettings, memory: float) -> MemoryEstimate:
    """Estimate the memory of a patched model, with an adapter or without, on a GPU of `memory` bytes.

    Weights count as if the frozen ones of the layers were quantised as `step` says.
    """
    base = base_of(model)
    layers, embeddings = base.get_decoder().layers, base.get_input_embeddings()
    forms, in_layers = _map_forms(layers, step), {id(weight) for weight in layers.parameters()}
    is_adapter = base is not model
    is_qlora = is_adapter and step.weights in ("nf4", "int8")  # TRL trains its adapter in bfloat16

    def stored(weight: Tensor) -> float:
        form = None if weight.requires_grad else forms.get(id(weight))
        return weight.numel() * (weight.element_size() if form is None else _QUANTISED[form])

    weights = trained = moments = gradients = 0.0
    for weight in model.parameters():
        is_cut = id(weight) in in_layers and not (is_adapter and weight.requires_grad)
        n_parts = step.shards if is_cut else 1
        if weight.requires_grad:
            own, width = weight.numel() / n_parts, 2 if is_qlora else weight.element_size()
            trained += own * width
            moments += own * step.moment_bytes(width)
        else:
            weights += stored(weight) / n_parts
    gradients = trained
    free = memory - CONTEXT - weights - trained - moments
    sizes = [LayerSizes.measure(layer, base.get_decoder().config) for layer in layers]
    moments_of_step = _Peaks(
        step, sizes, base.get_output_embeddings() or embeddings, gradients, free, is_adapter
    )
    n_recomputed = 0 if step.checkpointing in (False, "auto") else len(layers)
    activations, peak = moments_of_step.find(n_recomputed)
    while step.checkpointing == "auto" and peak > USABLE * free and n_recomputed < len(layers):
        n_recomputed += 1
        activations, peak = moments_of_step.find(n_recomputed)
    peak += weights + trained + moments + (gradients if step.accumulates else 0)
    if step.shards > 1:
        peak += _GATHERED * max(sum(map(stored, layer.parameters())) for layer in layers)
    figures = weights, trained, moments, gradients, activations, moments_of_step.loss, peak
    return MemoryEstimate(*map(int, figures))


def _map_forms(layers: nn.Module, step: StepSettings) -> dict[int, str | None]:
    """Map the ids of the weights that a quantised model has in few bits to their form."""
    forms = {id(module.weight): step.weights for module in layers.modules() if isinstance(module, nn.Linear)}
    experts = [module for module in layers.modules() if is_experts(module)]
    of_experts = step.experts or step.weights
    return forms | {id(get_stored_stack(module, name)): of_experts for module in experts for name in STACKS}


class _Peaks:
    """The moments of a step at which most memory is in use."""

    def __init__(
        self,
        step: StepSettings,
        sizes: list[LayerSizes],
        head: nn.Linear | nn.Embedding,
        gradients: float,
        free: float,
        is_adapter: bool,
    ):
        self._step, self._sizes, self._gradients = step, sizes, gradients
        self._width, tokens, hidden = step.dtype.itemsize, step.tokens, sizes[0].hidden
        self._plan = GateAndUpPlan([size.gate_and_up // 2 for size in sizes])
        self._plan.decide_by(2 * tokens * self._width, free)
        n_logits = min(tokens, max_chunk_rows(len(head.weight), step.dtype, step.dtype)) * len(head.weight)
        of_head = head.weight.numel() * (4 + self._width) * head.weight.requires_grad
        # Beside the logits the hidden states, normed or not, and their gradient in float32
        self.loss = n_logits * self._width + tokens * hidden * (2 * self._width + 4) + of_head
        self._adapter = sum(size.adapter for size in sizes) * self._width
        joins = is_adapter and step.optimizer == "adamw_torch_fused" and step.shards == 1
        self._in_update = _JOINED if joins else 1

    def find(self, n_recomputed: int) -> tuple[float, float]:
        """Return the bytes of the activations, and of the most beside weights and moments."""
        first, last, n = self._sizes[0], self._sizes[-1], len(self._sizes)
        kept = sum(self._kept(number) for number in range(n_recomputed, n))
        kept += self._adapter * (n - n_recomputed) / n
        inputs = self._step.tokens * first.hidden * self._width
        kept += inputs * (min(1, n_recomputed) if self._is_offloaded else n_recomputed)
        last_layer = self._backward(last, n_recomputed == n)
        first_layer = self._backward(first, n_recomputed > 0) + (0 if n_recomputed else self._kept(0))
        backward = max(kept + last_layer, self._gradients + first_layer)
        return kept, max(kept + self.loss, backward, self._in_update * self._gradients)

    @property
    def _is_offloaded(self) -> bool:
        return self._step.checkpointing in ("offload", "unsloth")

    @property
    def _dequantises(self) -> bool:
        return bool({"nf4", "int8", "mxfp4"} & {self._step.weights, self._step.experts})

    def _kept(self, number: int) -> float:
        """Return the bytes that a layer keeps if it is not recomputed."""
        size, per_element = self._sizes[number], self._step.tokens * self._width
        inside = size.gate_and_up * per_element
        return size.kept * per_element + inside * self._plan.keeps(number, size.hidden, inside)

    def _backward(self, size: LayerSizes, is_recomputed: bool) -> float:
        """Return the bytes that the backward pass of a layer takes, with what it recomputes."""
        tokens, features = self._step.tokens, size.gate_and_up // 2
        tile = features * tile_length(tokens, features, not is_recomputed) if features else 0
        inside = size.expert_rows * tokens or tile * (3 if is_recomputed else 1)
        mlp = inside + 3 * size.hidden * tokens + size.dense * self._dequantises
        attention = tokens * (4 * size.attention + 2 * size.hidden)  # gradients, and that of q in float32
        return self._width * (max(mlp, attention) + (size.kept * tokens if is_recomputed else 0))
