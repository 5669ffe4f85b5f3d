"""How much of a row's time attention takes: what grows with the squares of its documents' lengths."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import nn

from unsloth_pack.lora.vision_parts import VisionParts

# Multiplications of attention take longer than those of GEMMs, of which a step does 630 TFLOP/s on an H200:
# 1.7 times as long over long documents (docs/speed.md: 377 TFLOP/s from documents of 512 tokens to one of
# 8,192), and 3.6 times where a token's document has 290 tokens (docs/ranks.md), as tiles are not full.
_SLOWER, _NOT_FULL = 1.7, 320
_PASSES = 3.5  # forward once, backward 2.5 times
_FROZEN_PASSES, _TRAINED_PASSES = 2, 3  # through a linear layer: its weight's gradient is one of them


def attention_share(model: Any, seq_lengths: Sequence[Sequence[int]]) -> float:
    """The share of an average row's time, 0 to 1, as `PackedSampler` takes it.

    Multiplications are counted: those of attention with the tokens that a token sees, half of its document on
    average, and those in the linear layers of the decoder and in the head. Layers with a window count like
    the others.

    Args:
        model: its decoder, with an adapter or without.
        seq_lengths: document lengths of the packed rows.
    """
    lengths = np.fromiter(chain.from_iterable(seq_lengths), np.int64)
    of_token = float((lengths**2).sum() / max(1, lengths.sum()))  # tokens of its document, on average
    width = _attention_width(model.config.get_text_config())
    of_attention = _PASSES * _SLOWER * width * (of_token + _NOT_FULL)
    of_weights = sum(_weights_by_passes(model))
    return of_attention / (of_attention + of_weights) if of_attention else 0.0


def _attention_width(config: Any) -> int:
    """Features of the queries of all layers that attend."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    n_layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads = config.num_attention_heads
    return n_layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _weights_by_passes(model: Any) -> list[float]:
    """Of every linear layer that a token of text goes through, its weights by how often."""
    parts = VisionParts.of(model) if hasattr(model.config, "vision_config") else None
    found: list[float] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and (parts is None or parts.kind(path) not in ("tower", "aligner")):
            passes = _TRAINED_PASSES if module.weight.requires_grad else _FROZEN_PASSES
            found.append(passes * module.in_features * module.out_features)
    n_chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for path, weight in model.named_parameters():
        if weight.ndim == 3 and n_chosen and (parts is None or parts.kind(path) == "decoder"):
            passes = _TRAINED_PASSES if weight.requires_grad else _FROZEN_PASSES
            found.append(passes * weight.numel() * n_chosen / len(weight))
    return found
