"""Whether layers keep gate and up for the backward pass: all of them do while memory is free.

Gate and up are the largest of what a layer keeps. Computing them again costs a GEMM as large as the first, so
that is done only where memory is short, and not in every layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.graphs.gauge import free_bytes

_SHARE = 0.25  # of the free memory may hold gate and up; the rest of a step needs about as much again
_MANY_BYTES = 2**27  # of gate and up in a layer; below it they are always kept
_SPARING = 448  # one layer in (width / 448), at least one in two, computes gate and up again


class GateAndUpPlan:
    """Which layers of a decoder keep gate and up, decided for every step by its tokens and the free memory.

    Args:
        features: of gate, for a token, in every module that may keep them.
    """

    def __init__(self, features: Sequence[int]):
        self._features = list(features)
        self._has_room = False

    def decide(self, tokens: int, element_size: int, device: torch.device) -> None:
        """Decide for the step that begins. The driver is asked only where a layer may not keep them."""
        a_feature = 2 * tokens * element_size
        if device.type == "cuda" and max(self._features, default=0) * a_feature >= _MANY_BYTES:
            self._has_room = sum(self._features) * a_feature <= _SHARE * free_bytes(device)

    def keeps(self, number: int, width: int, n_bytes: int) -> bool:
        """Whether a layer on a GPU keeps them.

        Where memory is short every second layer of a narrow model computes them again, and every ninth of one
        that is 4,096 wide: computing a byte of them costs as many FLOP as the layer is wide.

        Args:
            number: the layer's, from 0.
            width: features of the layer's input.
            n_bytes: of gate and up in the layer.
        """
        return self._has_room or n_bytes < _MANY_BYTES or number % max(2, width // _SPARING) > 0


def keeps_gate_and_up(plan: GateAndUpPlan, layer: Any, number: int, x: Tensor, features: int) -> bool:
    """Whether a module keeps them for the backward pass; never in a layer that is recomputed.

    Args:
        layer: the decoder layer that holds it, of this number from 0.
        x: its input, `[.., width]`.
        features: of gate, for a token.
    """
    if layer.gradient_checkpointing:  # in eval mode too: it may be set between forward and recomputation
        return not getattr(layer._gradient_checkpointing_func, "recomputes", True)
    width = x.shape[-1]
    n_bytes: int = 2 * features * x.element_size() * (x.numel() // width)
    return not x.is_cuda or plan.keeps(number, width, n_bytes)
