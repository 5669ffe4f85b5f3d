"""A large layer in blocks of rows, which are merged one after the other.

A merge in float32 holds up to five times what is saved of a layer. An embedding or a head may be most of a
model, so this would be more than the model itself.
"""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

LARGE = 8192  # rows; layers with fewer are merged as a whole
_N_BLOCKS = 64


def can_be_cut(layer: Any) -> bool:
    """Whether a tuner layer is large, and each row of its merged weight depends on that row alone."""
    base, tokens = base_layer_of(layer), _tokens_of(layer)
    wrappers = [layer] if tokens is None or tokens is layer else [layer, tokens]
    if wrappers[-1].base_layer is not base or not _is_plain(base):
        return False
    return len(base.weight) > LARGE and all(map(_goes_by_rows, wrappers))


def base_layer_of(layer: Any) -> Any:
    """The layer below a tuner layer, and below the trained tokens of a tied head."""
    base = layer.get_base_layer()
    return base.token_adapter.get_base_layer() if isinstance(base, TrainableTokensWrapper) else base


def _tokens_of(layer: Any) -> Any:
    """The trained tokens that a tuner layer is, or that lie below its LoRA; None if there are none."""
    if isinstance(layer, TrainableTokensLayer):
        return layer
    below = layer.get_base_layer()
    return below.token_adapter if isinstance(below, TrainableTokensWrapper) else None


def _is_plain(base: nn.Module) -> bool:
    """Whether a layer is a matrix of numbers, which lies somewhere, and perhaps a bias."""
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    held = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
    names = {name for name, _ in base.named_parameters()}
    is_saved_alone = names <= {"weight", "bias"} and base.state_dict().keys() == names
    return held and weight.dim() == 2 and is_saved_alone and isinstance(base, nn.Linear | nn.Embedding)


def _goes_by_rows(wrapper: Any) -> bool:
    if wrapper.merged or wrapper.disable_adapters:
        return False
    if isinstance(wrapper, TrainableTokensLayer):
        return len(wrapper.active_adapters) == 1
    is_known = isinstance(wrapper, LoraLinear | LoraEmbedding)
    return is_known and not (
        wrapper.lora_variant or any(wrapper.lora_bias.values()) or getattr(wrapper, "fan_in_fan_out", False)
    )


def blocks_of(layer: Any) -> Iterator[tuple[slice, nn.Module]]:
    """Rows, and a layer of these alone: a tuner layer still to be merged, or one without an adapter.

    Args:
        layer: of which `can_be_cut` is true.
    """
    base, tokens = base_layer_of(layer), _tokens_of(layer)
    n_rows = len(base.weight)
    step = -(-n_rows // _N_BLOCKS)
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        block = _rows_of(base, rows)
        if tokens is not None:
            _put_tokens(block, tokens, rows)
        yield rows, block if layer is tokens else _adapted(layer, block, rows)


def _rows_of(base: nn.Module, rows: slice) -> nn.Module:
    """A plain layer whose weights are views of some rows."""
    weight: Any = base.weight
    n_rows, n_columns = weight[rows].shape
    if isinstance(base, nn.Embedding):
        block: Any = nn.Embedding(n_rows, n_columns, device="meta")
    else:
        block = nn.Linear(n_columns, n_rows, getattr(base, "bias", None) is not None, device="meta")
    for name, held in base.named_parameters():
        block.register_parameter(name, nn.Parameter(held.detach()[rows]))
    return block


def _put_tokens(block: Any, tokens: Any, rows: slice) -> None:
    """Replace rows of a block by those of trained tokens."""
    (adapter,) = tokens.active_adapters
    places = torch.tensor(tokens.token_indices[adapter])
    is_here = (places >= rows.start) & (places < rows.stop)
    weight = block.weight.detach().clone()
    trained = tokens.trainable_tokens_delta[adapter].detach()[is_here.to(weight.device)].to(weight)
    weight[(places[is_here] - rows.start).to(weight.device)] = trained
    block.weight = nn.Parameter(weight)


def _adapted(layer: Any, base: nn.Module, rows: slice) -> nn.Module:
    """The tuner layer over some rows of its base layer."""
    kind = LoraEmbedding if isinstance(layer, LoraEmbedding) else LoraLinear
    block: Any = kind.__new__(kind)
    block.__dict__ = {**layer.__dict__, "_modules": {**layer._modules, "base_layer": base}}
    if kind is LoraEmbedding:
        factors = {name: nn.Parameter(a.detach()[:, rows]) for name, a in layer.lora_embedding_A.items()}
        block._modules["lora_embedding_A"] = nn.ParameterDict(factors)
    else:
        block._modules["lora_B"] = nn.ModuleDict({n: _rows_of(b, rows) for n, b in layer.lora_B.items()})
    return block
