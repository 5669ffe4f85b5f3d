"""The most likely outputs of a language model's head, without its T x V logits.

Logits are float32, and of one chunk of rows at a time, as in `distillation`.

Shapes: T tokens, N of them with a label, L of a chunk, C features, K outputs of each, V outputs of the head.
"""

import math

import torch
from torch import Tensor

from unsloth_pack.kernels.arguments import ExtraLogits, TopLogProbs
from unsloth_pack.kernels.head import HeadPass, LabelledRows, prepare_head_inputs, scale_and_cap
from unsloth_pack.kernels.launch import wide_dtype


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelledRows,
    k: int,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
) -> TopLogProbs:
    """Find the k most likely outputs in the rows with a label, the likeliest first.

    Args:
        hidden, weight, labels, bias, softcap, scale, extra: as for `linear_cross_entropy`.
        k: from 1 to V.

    Returns:
        ids `[..., K]` int32 and log-probabilities float32 (float64 for float64); in rows without a label the
        ids 0 to k - 1, with -inf. Several times 2²⁸ bytes of logits exist at a time.
    """
    inputs, labelled = prepare_head_inputs(hidden, weight, bias, labels, softcap, extra)
    rows, shape = labelled.rows, (*labelled.labels.shape, k)
    ids_TK = torch.arange(k, dtype=torch.int32, device=hidden.device).repeat(math.prod(shape[:-1]), 1)
    log_probs_TK = hidden.new_full(ids_TK.shape, -math.inf, dtype=wide_dtype(hidden))

    def turn(logits_LV: Tensor, labels_L: Tensor, chunk: slice) -> None:
        z_LV = scale_and_cap(logits_LV, scale, softcap)
        top = z_LV.topk(k)
        ids_TK[rows[chunk]] = top.indices.int()
        log_probs_TK[rows[chunk]] = top.values - z_LV.logsumexp(-1, keepdim=True)

    HeadPass(inputs, labelled, [False] * 5, (scale, softcap), is_wide=True).run(turn)
    return TopLogProbs(ids_TK.view(shape), log_probs_TK.view(shape))
