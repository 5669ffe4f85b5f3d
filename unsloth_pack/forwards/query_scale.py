"""Queries that grow with the logarithm of their position (Llama 4, 2025; Ministral 3).

q is multiplied by 1 + beta * log(1 + floor(position / P)), P the positions that the model was first trained
with. So the factor is 1 before position P.
"""

from typing import Any

import torch
from torch import Tensor


def scaled_by_position(q: Tensor, position_ids: Tensor, config: Any) -> Tensor:
    """q in its own dtype.

    Args:
        q: `[N, H, D]` or `[B, H, T, D]`.
        position_ids: `[N]`, `[1, T]` or `[B, T]`.
        config: the model's; its `rope_parameters` hold beta and P.
    """
    beta = config.rope_parameters["llama_4_scaling_beta"]
    periods = torch.floor(position_ids / config.rope_parameters["original_max_position_embeddings"])
    scale = 1 + beta * torch.log1p(periods)
    scale = scale[:, None, None] if q.dim() == 3 else scale[:, None, :, None]
    return q * scale.to(q.dtype)
