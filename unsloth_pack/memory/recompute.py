"""Which layers to recompute in the backward pass: as few as the free memory of the GPU allows.

The last layers are kept, since their activations are freed before the first layers are recomputed. Before the
first step what a layer keeps is estimated from its sizes; then it is measured, and so is what a step needs
beside: the loss, gradients, one layer in its backward pass.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_USABLE = 0.95  # of the memory that is free: the rest goes to fragments
_LAYERS_BESIDE = 3  # layers' worth of activations that a backward pass works in, until it is measured
_BYTES_A_LOGIT = 10  # in 16 bits, in float32 and their gradient, until it is measured

logger = logging.getLogger("unsloth_pack")


class RecomputePlan:
    """How many of a decoder's first layers are recomputed, for rows of so many tokens.

    Args:
        decoder: a patched transformers decoder.
    """

    def __init__(self, decoder: Any):
        self.n_layers = len(decoder.layers)
        self.n_recomputed = 0
        width = decoder.get_input_embeddings().weight.element_size()
        self._per_token = width * max(_estimate(layer, decoder.config) for layer in decoder.layers)
        self._beside = _LAYERS_BESIDE * self._per_token + _BYTES_A_LOGIT * decoder.config.vocab_size
        self._is_measured = False
        self._tokens = 0
        self._before: tuple[int, int] | None = None  # bytes at rest, and the most ever, as the step began
        self._said: int | None = None

    def __str__(self) -> str:
        return f"{self.n_recomputed} of {self.n_layers} layers are recomputed"

    def keeps(self, layer: int) -> bool:
        """Whether the layer of this number, from 0, is not recomputed."""
        return layer >= self.n_recomputed

    def decide(self, tokens: int, device: torch.device) -> None:
        """Decide for the step that begins, from what is free now and from what the last one took."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._learn(device)
        free = _free(device)
        room = _USABLE * free - self._beside * tokens
        n_kept = min(self.n_layers, max(0, int(room // (self._per_token * tokens))))
        self.n_recomputed, self._tokens = self.n_layers - n_kept, tokens
        self._before = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        if self.n_recomputed != self._said:
            self._said = self.n_recomputed
            logger.warning(
                "gradient checkpointing: %s at %s tokens (%.1f GiB free, %.2f GiB a layer)",
                *(self, f"{tokens:,}", free / 2**30, self._per_token * tokens / 2**30),
            )

    def leaves_room(self, device: torch.device) -> bool:
        """Whether the forward pass that has ended left what the loss and the backward pass need."""
        if self._before is None or self.n_recomputed == self.n_layers:
            return True
        return _free(device) >= self._beside * self._tokens

    def lower(self) -> bool:
        """After running out of memory: expect a fifth more of every layer. False where all is recomputed."""
        self._before = None
        self._per_token *= 1.2
        self._beside *= 1.2
        return self.n_recomputed < self.n_layers

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a layer that is kept: the first one tells what a layer keeps."""
        if self._is_measured or not self._tokens:
            yield
            return
        before = torch.cuda.memory_allocated()
        yield
        self._per_token = max(1.0, (torch.cuda.memory_allocated() - before) / self._tokens)
        self._is_measured = True

    def _learn(self, device: torch.device) -> None:
        """What the last step needed beside the kept layers, where it needed more than any before it."""
        if self._before is None or not (self._is_measured or self.n_recomputed == self.n_layers):
            return
        at_rest, most = self._before
        peak = torch.cuda.max_memory_allocated(device)
        if peak > most:
            kept = (self.n_layers - self.n_recomputed) * self._per_token * self._tokens
            self._beside = max(self._per_token, (peak - at_rest - kept) / self._tokens)


def _estimate(layer: nn.Module, config: Any) -> float:
    """Numbers a token that a layer keeps: the outputs of its projections, and four hidden states."""
    outputs = sum(m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
    experts = getattr(config, "num_experts_per_tok", 0) * getattr(config, "moe_intermediate_size", 0)
    return outputs + 3 * experts + 4 * config.hidden_size


def _free(device: torch.device) -> int:
    """Bytes that this process can still allocate."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + reserved, allowed) - allocated
