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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.mixers import MIXERS, AttentionMixer
from unsloth_pack.layers.mixers.attention import read_window
from unsloth_pack.lora.expert_stacks import STACKS, get_stored_stack, is_experts
from unsloth_pack.losses.head import why_head_not_fused
from unsloth_pack.memory.layer_sizes import count_chosen
from unsloth_pack.models import arch_spec_for
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import base_of

Flops = Tensor | float  # a tensor may be on the device
Place = tuple[int, float]  # number of a layer, -1 before all; then 0 and 1 in its mixer, 2 and 3 in its MLP
_ORDER = {"q_b_proj": 0.25, "kv_b_proj": 0.25, "o_proj": 1.0, "out_proj": 1.0, "down_proj": 1.0}
_AT_SCORES, _LAST = 0.5, 3.0  # of attention; of an MLP's last projection
_TOKEN, _LABEL, _NO_WINDOW = -2, -1, 2**62  # of `_Product.each`


class _Product(NamedTuple):
    """Products of matrices that take 2 `n` FLOPs forward for `each`."""

    place: Place
    n: float
    trains: bool = False
    is_second: bool = False  # the second factor of an adapter
    each: int = _TOKEN  # or `_LABEL`, or the window of attention: for a query and a key that it sees

    def backward(self, first: Place) -> int:
        """Return how many times its forward the gradients take; `first` is where the first weight trains."""
        needs_input = self.place > first or (self.is_second and self.place == first)
        return needs_input * (2 if self.each > 0 else 1) + self.trains


class ModelFlops:
    """The FLOPs of a transformers model, patched or not, with the weights that train when this is created."""

    def __init__(self, model: Any):
        base = base_of(model)
        decoder: Any = base.get_decoder()
        self._base, self._decoder, self._n_layers = base, decoder, len(decoder.layers)
        spec, embeddings = arch_spec_for(decoder.config.model_type), base.get_input_embeddings()
        config = decoder.config
        chosen = count_chosen(config)
        self._products: list[_Product] = []
        for module in decoder.children():
            if module not in (decoder.layers, embeddings):
                self._products += [x._replace(place=(-1, 0)) for _, x in _list_products(module, chosen)]
        for number, layer in enumerate(decoder.layers):
            mixers = [MIXERS[name] for name in spec.mixers_of(config, number)]
            names = {spec.name(mixer.attribute) for mixer in mixers}
            for path, x in _list_products(layer, chosen):
                self._products.append(x._replace(place=(number, _find_order(path, names, spec))))
            for mixer in mixers:
                if isinstance(mixer, AttentionMixer):
                    attention = getattr(layer, spec.name(mixer.attribute))
                    of_q, of_v = mixer.head_sizes(attention)
                    n_heads = getattr(attention, spec.name("o_proj")).in_features // of_v
                    window = read_window(attention, spec) or _NO_WINDOW
                    x = _Product((number, _AT_SCORES), n_heads * (of_q + of_v), each=window)
                    self._products.append(x)
        head = base.get_output_embeddings() or nn.Module()
        end: Place = (self._n_layers, 0)
        self._products += [x._replace(place=end, each=_LABEL) for _, x in _list_products(head, chosen)]
        self._first = self._find_first(embeddings)
        self._costs: dict[tuple[bool, int], list[Mapping[int, float]]] = {}

    def _find_first(self, embeddings: nn.Module) -> Place:
        """Return where the first weight trains: what comes before needs no gradient of its input."""
        places = [x.place for x in self._products if x.trains]
        for number, layer in enumerate(self._decoder.layers):
            places += [(number, -1) for p in layer.parameters() if p.requires_grad and p.dim() < 2]  # a norm
        inside = {id(p) for p in self._decoder.parameters()}
        towers = (p for p in self._base.base_model.parameters() if id(p) not in inside)
        places += [(-1, -1) for p in (*embeddings.parameters(), *towers) if p.requires_grad]
        return min(places, default=(self._n_layers, 1))

    def count(self, keys: Tensor, n_labels: Flops | None, trains: bool = True) -> tuple[Flops, Flops]:
        """Return the model and hardware FLOPs of a pass, forward alone unless it `trains`.

        Hardware FLOPs are 0 of a model that is not patched: nothing is known of how it computes.

        Args:
            keys: how many each token sees, itself included; 0 on padding.
            n_labels: tokens with a label; None for all.
        """
        kind = trains, self._count_recomputed() if trains else 0
        if kind not in self._costs:
            is_patched = isinstance(self._base, FastCausalLM)
            self._costs[kind] = [self._cost(*kind, packed) for packed in (False, True)[: 1 + is_patched]]
        plain, *packed = self._costs[kind]
        windows = sorted(each for each in plain if each > 0)
        sums = [torch.count_nonzero(keys), *(keys.clamp(max=window).sum() for window in windows)]
        together = torch.stack(sums).double()
        n_tokens, *n_pairs = together if together.is_cuda else together.tolist()
        numbers: dict[int, Any] = dict(zip(windows, n_pairs, strict=True)) | {
            _TOKEN: n_tokens,
            _LABEL: n_tokens,
        }
        model_flops = sum(flops * numbers[each] for each, flops in plain.items())
        numbers[_LABEL] = n_tokens if n_labels is None else n_labels
        return model_flops, sum(flops * numbers[each] for cost in packed for each, flops in cost.items())

    def _count_recomputed(self) -> int:
        """Return how many of the first layers checkpointing recomputes."""
        if not getattr(self._decoder.layers[0], "gradient_checkpointing", False):
            return 0
        plan = getattr(self._decoder, "recompute_plan", None)
        return self._n_layers if plan is None else plan.n_recomputed

    def _cost(self, trains: bool, n_recomputed: int, packed: bool) -> Mapping[int, float]:
        """Return the FLOPs of a pass for each token, label and pair; `packed` as a patched model computes."""
        # Where all layers are recomputed, the embeddings require a gradient
        first = (-1, -1) if packed and n_recomputed == self._n_layers else self._first
        has_own_head = packed and why_head_not_fused(self._base) is not None
        trains_head = any(x.trains for x in self._products if x.each == _LABEL)
        cost: dict[int, float] = defaultdict(float)
        for x in self._products:
            times = 1.0 + trains * x.backward(first)
            if packed and trains:
                again = 0 <= x.place[0] < n_recomputed and x.place[1] < _LAST
                again |= (
                    x.each == _LABEL and trains_head and not has_own_head
                )  # see `kernels/token_scores.py`
                times += again + 0.5 * (x.each > 0 and x.place > first)
            cost[_TOKEN if x.each == _LABEL and has_own_head else x.each] += 2 * x.n * times
        return cost


def _find_order(path: str, mixers: Iterable[str], spec: ArchSpec) -> float:
    """Return the second number of the place of a module at a path below a layer."""
    order = _ORDER | {spec.name(name): place for name, place in _ORDER.items()}
    names = path.split(".")
    return 2 * (names[0] not in mixers) + max(order.get(name, 0.0) for name in names)


def _list_products(root: nn.Module, chosen: int) -> Iterator[tuple[str, _Product]]:
    """List the weights below a module that multiply tokens, by path; of experts, those of a token."""
    shares: dict[str, float] = {}  # of the experts' adapters, by the path of their wrapper
    for path, module in root.named_modules():
        if "original_module" in path or "parametrizations" in path or isinstance(module, nn.Embedding):
            continue  # not those that a trained copy replaces
        if isinstance(module, ParamWrapper) and module.num_experts > 1:
            shares[path] = chosen / module.num_experts
        elif isinstance(module, nn.Linear):
            n = shares.get(path.rpartition(".lora_")[0], 1.0) * module.in_features * module.out_features
            yield path, _Product((0, 0), n, module.weight.requires_grad, ".lora_B." in path)
        else:  # a router, a convolution, experts
            weights: dict[str, Any] = dict(module.named_parameters(recurse=False))
            if is_experts(module):
                weights = {name: get_stored_stack(module, name) for name in STACKS}
            for name, weight in weights.items():
                shape = getattr(weight, "ds_shape", weight.shape)
                if len(shape) > 1:
                    is_stack = len(shape) == 3 and not isinstance(module, nn.Conv1d)
                    n = chosen * shape[1:].numel() if is_stack else shape.numel()
                    yield f"{path}.{name}", _Product((0, 0), n, getattr(weight, "requires_grad", False))


def count_keys(batch: Mapping[str, Any]) -> Tensor:
    """Count the keys that each token of a batch sees, itself included; 0 on padding. Waits for no device."""
    row: Any = batch.get("packed_row")
    if row is not None:
        return torch.from_numpy(getattr(row, "row", row).positions) + 1  # of a `PaddedBatch`, or of the row
    if "attention_mask" in batch:
        mask: Tensor = batch["attention_mask"]
        return mask.cumsum(-1) * mask
    positions: Tensor = batch["position_ids"]
    return positions + 1
