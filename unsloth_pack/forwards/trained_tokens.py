"""Input embeddings of which a few rows are trained (PEFT's `trainable_token_indices`).

PEFT copies the whole matrix at every call to put the trained rows into it, and its gradient is as large. Here
the frozen rows are looked up as they are, and the trained ones in their own small matrix.
"""

from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.modules.hooks import has_hooks

_UNTRAINED = -1


class FastTrainedTokens(nn.Module):
    """Takes the place of the class of a `TrainableTokensWrapper` around input embeddings.

    Calls that differ from PEFT's plain one go through PEFT's own forward.

    Args:
        places: for the tokens that `placed` lists, the row of each in the trained matrix, `[V]`.
    """

    token_adapter: Any
    disable_adapters: bool
    placed: tuple[int, ...] | None = None
    places: Tensor

    @runs_eagerly
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., C]` for token ids `[...]`."""
        if args or kwargs or not self._runs_fused():
            return super().forward(x, *args, **kwargs)
        layer = self.token_adapter
        (name,) = layer.active_adapters
        embeddings: Tensor = layer.base_layer(x)
        trained = layer.trainable_tokens_delta[name].to(layer.base_layer.weight.dtype)
        place = self._places_of(layer.token_indices[name], x.device)[x]
        rows = F.embedding(place.clamp(min=0), trained)
        if (scale := layer._get_embed_scale()) is not None:
            rows = rows * scale.to(rows.dtype)
        return torch.where((place != _UNTRAINED)[..., None], rows, embeddings)

    def _runs_fused(self) -> bool:
        layer = self.token_adapter
        base = layer.base_layer
        if self.disable_adapters or layer.disable_adapters or layer.merged or has_hooks(layer, base):
            return False
        names = layer.active_adapters
        if len(names) != 1 or names[0] not in layer.trainable_tokens_delta:
            return False
        is_plain = isinstance(base, nn.Embedding) and base.max_norm is None and not base.scale_grad_by_freq
        return is_plain and base.padding_idx not in layer.token_indices[names[0]]

    def _places_of(self, tokens: list[int], device: torch.device) -> Tensor:
        if self.placed != tuple(tokens) or self.places.device != device:
            places = torch.full((self.token_adapter.base_layer.num_embeddings,), _UNTRAINED)
            places[torch.tensor(tokens)] = torch.arange(len(tokens))
            self.__dict__.update(places=places.to(device), placed=tuple(tokens))
        return self.places


def trains_tokens(embeddings: nn.Module) -> bool:
    """Whether PEFT trains a few rows of input embeddings."""
    return isinstance(embeddings, TrainableTokensWrapper)
