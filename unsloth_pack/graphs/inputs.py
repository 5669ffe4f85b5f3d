"""What goes into a decoder beside the row: token ids, or embeddings that hold images.

Shapes: B rows of T tokens, N = B * T, V of them stand for images, C features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.graphs.memory import GraphMemory
from unsloth_pack.models.vision_spec import DEEPSTACK
from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embeddings in place of token ids.

    Args:
        embeds: `[B, T, C]`.
        by_layer: `[V, C]` each, what is added to the tokens of images behind the first layers (DeepStack).
    """

    embeds: Tensor
    by_layer: Sequence[Tensor] = ()

    def by_token(self, row: PackedRow) -> list[Tensor]:
        """`[N, C]` each: the embeddings, and what is added to every token behind each of the first layers."""
        embeds_NC = self.embeds.flatten(0, 1)
        # -0.0 and not 0.0: to add it changes no bit of any number
        nothing = [torch.full_like(embeds_NC, -0.0, requires_grad=False) for _ in self.by_layer]
        added = (
            none_NC.index_copy_(0, row.visual_ids, features_VC.to(embeds_NC.dtype))
            for none_NC, features_VC in zip(nothing, self.by_layer, strict=True)
        )
        return [embeds_NC, *added]


@dataclass(frozen=True)
class EmbeddedForm:
    """What rows of embeddings have to share to replay the same graphs.

    Args:
        features: of a token.
        n_layers: behind how many layers something is added.
        trains: whether a gradient goes on from them, to what has made the images for example.
    """

    features: int
    dtype: torch.dtype
    n_layers: int
    trains: bool

    @classmethod
    def of(cls, inputs: Tensor | Embedded) -> "EmbeddedForm | None":
        """None of token ids."""
        if isinstance(inputs, Tensor):
            return None
        embeds, by_layer = inputs.embeds, inputs.by_layer
        trains = any(x.requires_grad for x in (embeds, *by_layer))
        return cls(embeds.shape[-1], embeds.dtype, len(by_layer), trains)


class StaticInputs:
    """The inputs that graphs read, for `tokens` tokens.

    Args:
        form: None for token ids.

    Attributes:
        leaves: `[tokens, C]` each; those whose gradients the graphs compute.
    """

    def __init__(self, tokens: int, form: EmbeddedForm | None, device: torch.device, memory: GraphMemory):
        self._ids: Tensor | None = None
        self._by_token: list[Tensor] = []
        if form is None:
            self._ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        else:
            for number in range(1 + form.n_layers):
                x = memory.input(number, tokens, form.features, form.dtype, device)
                self._by_token.append(x.requires_grad_(form.trains))
        self.leaves = [x for x in self._by_token if x.requires_grad]

    def fill(self, inputs: list[Tensor] | Tensor, n_tokens: int) -> None:
        """Take the inputs of a row.

        Args:
            inputs: token ids `[B, T]`, or what `Embedded.by_token` gives.
        """
        if self._ids is not None:
            assert isinstance(inputs, Tensor)
            self._ids[0, :n_tokens].copy_(inputs.reshape(-1))  # behind them are ids of a row before
            return
        with torch.no_grad():
            for static, given in zip(self._by_token, inputs, strict=True):
                static[:n_tokens].copy_(given)
                static[n_tokens:].zero_()  # not of a row before: a NaN there would reach the gradients

    def arguments(self) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
        """What `_packed_forward` of a decoder takes behind the row."""
        if not self._by_token:
            return self._ids, None, {}
        embeds, *by_layer = self._by_token
        return None, embeds[None], {DEEPSTACK: by_layer} if by_layer else {}
