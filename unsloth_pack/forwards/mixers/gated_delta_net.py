"""Gated delta net (Yang et al. 2024, "Gated Delta Networks"): a short convolution, then a linear attention.

The state of the linear attention and the last tokens of the convolution would go over to the next document.
"""

from typing import Any

import numpy as np
import torch

from unsloth_pack.forwards.mixers.state_layer import StateMixer, seq_idx
from unsloth_pack.row.packed_row import PackedRow


def _boundaries(row: PackedRow) -> dict[str, Any]:
    """For causal-conv1d the number of each token's document; for flash-linear-attention where they end.

    The latter also on the host: otherwise it fetches them from the device.
    """

    def ends_on_host() -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(row.lengths)]).astype(np.int64))

    ends = {"cu_seq_lens_q": row.cu_seqlens, "cu_seqlens_cpu": row.once("cu_seqlens_cpu", ends_on_host)}
    return seq_idx(row) | ends


GATED_DELTA_NET = StateMixer(
    kind="gated delta net",
    attribute="linear_attn",
    boundaries=_boundaries,
    packages={"fla": "fla-core", "causal_conv1d": "causal-conv1d"},
    known_names="""
        A_log a_proj activation allow_neg_eigval b_proj config conv1d conv_dim conv_kernel_size dt_bias
        eps g_proj head_k_dim head_v_dim hidden_size in_proj_a in_proj_b in_proj_ba in_proj_qkv
        in_proj_qkvz in_proj_z k_proj key_dim layer_idx layer_norm_epsilon layer_type norm num_k_heads
        num_v_heads o_norm o_proj out_proj q_proj v_proj value_dim
        """,
)
