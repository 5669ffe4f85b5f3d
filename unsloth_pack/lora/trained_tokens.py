"""Input embeddings of which PEFT trains the rows of a few tokens.

Shapes: V tokens of the vocabulary, C features.
"""

from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.modules import has_hooks, no_compile

_UNTRAINED = -1


class FastTrainedTokens(nn.Module):
    """Replaces the class of a `TrainableTokensWrapper` around input embeddings.

    PEFT puts the trained rows into a copy of the whole matrix at every call, which no graph can capture. Here
    they are looked up in their own small matrix.
    """

    token_adapter: Any
    disable_adapters: bool
    placed: tuple[int, ...] | None = None
    places: Tensor  # `[V]`, the row of each token in the trained matrix, for the tokens in `placed`; else -1

    @no_compile
    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return `[..., C]` for token ids `[...]`."""
        if args or kwargs or not self._runs_fused():
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        layer = self.token_adapter
        (name,) = layer.active_adapters
        embeddings: Tensor = layer.base_layer(x)
        trained = layer.trainable_tokens_delta[name].to(layer.base_layer.weight.dtype)
        place = self._find_places(layer.token_indices[name], x.device)[x]
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

    def _find_places(self, tokens: list[int], device: torch.device) -> Tensor:
        if self.placed != tuple(tokens) or self.places.device != device:
            places = torch.full((self.token_adapter.base_layer.num_embeddings,), _UNTRAINED)
            places[torch.tensor(tokens)] = torch.arange(len(tokens))
            self.__dict__.update(places=places.to(device), placed=tuple(tokens))
        return self.places


def trains_tokens(embeddings: nn.Module) -> bool:
    """Return whether PEFT trains a few rows of input embeddings."""
    return isinstance(embeddings, TrainableTokensWrapper)
