"""Count the floating-point operations of training.

N weights that multiply a token take 2N FLOPs forward, 2N backward for the gradient of the token and 2N for
their own: 6N if they train, 4N if they are frozen, 2N if nothing trains before them. Softmax attention takes
2 H (D_qk + D_v) for a query and each key that it sees, in H heads, and twice that backward.

Model FLOPs, of MFU, are those of plain training: the head scores every token, and nothing is computed again.
Hardware FLOPs, of HFU, are those of a patched model: attention computes its scores again backward (2.5 times
its forward), a recomputed layer runs forward again up to its MLP's last projection, and the head scores
tokens with a label alone.

Neither counts norms, activations, recurrences of layers with a state, vision towers, generation, the
optimizer and dequantisation; hardware FLOPs no recomputation of gate and up outside of recomputed layers.

Source: Chowdhery et al. 2022 (PaLM), appendix B, for documents in place of rows; Dao 2023 (FlashAttention-2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedConfig

from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.mixers import MIXERS, AttentionMixer
from unsloth_pack.layers.mixers.attention import read_window
from unsloth_pack.lora.expert_stacks import STACKS, get_stored_stack, is_experts
from unsloth_pack.losses.head import why_head_not_fused
from unsloth_pack.models import arch_spec_for
from unsloth_pack.models.spec import ArchSpec

Batch = Mapping[str, Any]
Flops = Tensor | float  # a tensor may be on the device
Place = tuple[int, float]  # number of a layer, -1 before all; then 0 and 1 in its mixer, 2 and 3 in its MLP
_AT_SCORES = 0.5  # of attention, between its projections
_LAST = 3.0  # of an MLP's last projection
_ORDER = {"q_b_proj": 0.25, "kv_b_proj": 0.25, "o_proj": 1.0, "out_proj": 1.0, "down_proj": 1.0}


class _Product(NamedTuple):
    """Weights that multiply each token."""

    place: Place
    n_weights: float
    weight: Tensor | None
    is_second: bool = False  # the second factor of an adapter

    @property
    def trains(self) -> bool:
        return self.weight is not None and self.weight.requires_grad

    def flops(self, backward: bool, first: Place) -> float:
        """Return those of a token, forward or also backward; `first` is where the first weight trains."""
        needs_input = self.place > first or (self.is_second and self.place == first)
        return 2 * self.n_weights * (1 + backward * (needs_input + self.trains))


class _Attention(NamedTuple):
    """Softmax attention of a layer."""

    place: Place
    window: int | None  # keys that a query sees at most
    pair: float  # FLOPs of a query and a key, forward


class _Cost(NamedTuple):
    """FLOPs of a pass: of a token, beside of a token with a label, and of a query and a key by the window."""

    token: float
    label: float
    pairs: Mapping[int | None, float]

    def of(self, keys: Tensor, n_labels: Flops | None) -> Flops:
        """Return those of tokens `[...]` that see so many keys, 0 on padding.

        n_labels: how many of them have a label; None for all.
        """
        pairs = [(keys if window is None else keys.clamp(max=window)).sum() for window in self.pairs]
        sums = torch.stack([torch.count_nonzero(keys), *pairs]).double()
        n_tokens, *n_pairs = sums if sums.is_cuda else sums.tolist()
        flops: Flops = self.token * n_tokens + self.label * (n_tokens if n_labels is None else n_labels)
        return sum((cost * n for cost, n in zip(self.pairs.values(), n_pairs, strict=True)), flops)


class ModelFlops:
    """The FLOPs of a transformers model, patched or not, with the weights that train when this is created."""

    def __init__(self, model: Any):
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        decoder: Any = base.get_decoder()
        self._base, self._decoder, self._n_layers = base, decoder, len(decoder.layers)
        config = decoder.config
        spec = arch_spec_for(config.model_type)
        embeddings, head = base.get_input_embeddings(), base.get_output_embeddings() or nn.Module()
        beside = [x for x in decoder.children() if x not in (decoder.layers, embeddings)]
        self._head = list(_list_products(head, config, lambda _: (self._n_layers, 0)))
        self._products = [x for module in beside for x in _list_products(module, config, lambda _: (-1, 0))]
        self._attention: list[_Attention] = []
        trained: list[Place] = []
        for number, layer in enumerate(decoder.layers):
            place_of = partial(_find_place, number, spec, config)
            own = list(_list_products(layer, config, place_of))
            self._products += own
            self._attention += _list_attention(layer, number, spec, config)
            weights = {id(x.weight) for x in own}
            trained += [(number, -1) for p in layer.parameters() if p.requires_grad and id(p) not in weights]
        known = {id(p) for module in (decoder.layers, head, *beside) for p in module.parameters()}
        towers = (p for p in base.base_model.parameters() if id(p) not in known)
        trained += [(-1, -1) for p in (*embeddings.parameters(), *towers) if p.requires_grad]
        products = (*self._products, *self._head)
        trained += [x.place for x in products if x.trains]
        self._first = min(trained, default=(self._n_layers, 1))
        self._costs: dict[tuple[bool, int], tuple[_Cost, _Cost | None]] = {}

    def count(self, keys: Tensor, n_labels: Flops | None, trains: bool = True) -> tuple[Flops, Flops]:
        """Return the model and hardware FLOPs of a pass, forward alone unless it `trains`; see `_Cost.of`.

        Hardware FLOPs are 0 of a model that is not patched: nothing is known of how it computes.
        """
        kind = trains, self._count_recomputed() if trains else 0
        if kind not in self._costs:
            is_patched = isinstance(self._base, FastCausalLM)
            self._costs[kind] = self._plain_cost(trains), self._packed_cost(*kind) if is_patched else None
        plain, packed = self._costs[kind]
        return plain.of(keys, n_labels), 0.0 if packed is None else packed.of(keys, n_labels)

    def _count_recomputed(self) -> int:
        """Return how many of the first layers checkpointing recomputes."""
        if not getattr(self._decoder.layers[0], "gradient_checkpointing", False):
            return 0
        plan = getattr(self._decoder, "recompute_plan", None)
        return self._n_layers if plan is None else plan.n_recomputed

    def _plain_cost(self, trains: bool) -> _Cost:
        token = sum(x.flops(trains, self._first) for x in (*self._products, *self._head))
        return _Cost(token, 0.0, self._pairs(2.0 * trains, self._first, 0))

    def _packed_cost(self, trains: bool, n_recomputed: int) -> _Cost:
        # Where all layers are recomputed, the embeddings require a gradient
        first = (-1, -1) if n_recomputed == self._n_layers else self._first
        again = [x for x in self._products if 0 <= x.place[0] < n_recomputed and x.place[1] < _LAST]
        token = sum(x.flops(trains, first) for x in self._products) + sum(
            x.flops(False, first) for x in again
        )
        head = sum(x.flops(trains, first) for x in self._head)
        pairs = self._pairs(2.5 * trains, first, n_recomputed)
        if why_head_not_fused(self._base) is not None:
            return _Cost(token + head, 0.0, pairs)
        if trains and any(x.trains for x in self._head):  # see `kernels/token_scores.py`
            head += sum(x.flops(False, first) for x in self._head)
        return _Cost(token, head, pairs)

    def _pairs(self, backward: float, first: Place, n_recomputed: int) -> dict[int | None, float]:
        pairs: dict[int | None, float] = {}
        for place, window, pair in self._attention:
            times = 1 + backward * (place > first) + (place[0] < n_recomputed)
            pairs[window] = pairs.get(window, 0.0) + pair * times
        return pairs


def _find_place(number: int, spec: ArchSpec, config: PreTrainedConfig, path: str) -> Place:
    """Return the place of a module at a path below a layer."""
    mixers = {spec.name(MIXERS[name].attribute) for name in spec.mixers_of(config, number)}
    order = _ORDER | {spec.name(name): place for name, place in _ORDER.items()}
    names = path.split(".")
    return number, 2 * (names[0] not in mixers) + max(order.get(name, 0.0) for name in names)


def _list_products(
    root: nn.Module, config: PreTrainedConfig, place_of: Callable[[str], Place]
) -> Iterator[_Product]:
    """List the weights below a module that multiply tokens; of experts, as many as a token has."""
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    shares: dict[str, float] = {}  # of the experts' adapters, by the path of their wrapper
    for path, module in root.named_modules():
        if "original_module" in path or "parametrizations" in path or isinstance(module, nn.Embedding):
            continue  # not those that a trained copy replaces
        if isinstance(module, ParamWrapper) and module.num_experts > 1:
            shares[path] = chosen / module.num_experts
        elif isinstance(module, nn.Linear):
            is_second = ".lora_B." in path
            share = shares.get(path.rpartition(".lora_")[0], 1.0)
            n_weights = share * module.in_features * module.out_features
            yield _Product(place_of(path), n_weights, module.weight, is_second)
        elif is_experts(module):
            for name in STACKS:
                stack: Any = get_stored_stack(module, name)
                weight = stack if isinstance(stack, nn.Parameter) else None
                n_weights = chosen * stack.shape[1:].numel()
                yield _Product(place_of(f"{path}.{name}"), n_weights, weight)
        else:  # a router, a convolution, experts without a gate
            for name, weight in module.named_parameters(recurse=False):
                shape = getattr(weight, "ds_shape", weight.shape)
                if len(shape) > 1:
                    is_stack = len(shape) == 3 and not isinstance(module, nn.Conv1d)
                    n_weights = chosen * shape[1:].numel() if is_stack else shape.numel()
                    yield _Product(place_of(f"{path}.{name}"), n_weights, weight)


def _list_attention(
    layer: nn.Module, number: int, spec: ArchSpec, config: PreTrainedConfig
) -> Iterator[_Attention]:
    for mixer in (MIXERS[name] for name in spec.mixers_of(config, number)):
        if isinstance(mixer, AttentionMixer):
            module: Any = getattr(layer, spec.name(mixer.attribute))
            of_q, of_v = mixer.head_sizes(module)
            heads = getattr(module, spec.name("o_proj")).in_features // of_v
            yield _Attention((number, _AT_SCORES), read_window(module, spec), 2 * heads * (of_q + of_v))


class FlopCounter:
    """Counts the FLOPs of a trainer's updates: of the model that trains, and of teachers and references."""

    def __init__(self, model: Any):
        self._model = model
        self._by_model = {id(model): ModelFlops(model)}

    def count(
        self, batches: Sequence[Batch], n_labels: Flops | None, frozen: Iterable[tuple[Any, Batch]] = ()
    ) -> tuple[Flops, Flops]:
        """Return the model and hardware FLOPs of an update, without waiting for the device.

        Args:
            n_labels: of all batches; None if it is not known.
            frozen: passes without gradients beside: a model and its batch.
        """
        each = None if n_labels is None else n_labels / len(batches)
        passes = [(self._model, batch, True) for batch in batches]
        passes += [(model, batch, False) for model, batch in frozen]
        counts = [self._of(model).count(_count_keys(batch), each, trains) for model, batch, trains in passes]
        plain, packed = (sum(flops, start=0.0) for flops in zip(*counts, strict=True))
        return plain, packed

    def _of(self, model: Any) -> ModelFlops:
        if id(model) not in self._by_model:
            self._by_model[id(model)] = ModelFlops(model)
        return self._by_model[id(model)]


def _count_keys(batch: Batch) -> Tensor:
    """Count the keys that each token of a batch sees, itself included; 0 on padding."""
    row: Any = batch.get("packed_row")
    if row is not None:
        return torch.from_numpy(getattr(row, "row", row).positions) + 1  # of a `PaddedBatch`, or of the row
    if "attention_mask" in batch:
        mask: Tensor = batch["attention_mask"]
        return mask.cumsum(-1) * mask
    positions: Tensor = batch["position_ids"]
    return positions + 1
