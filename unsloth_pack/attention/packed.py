"""Attention over a packed row."""

from torch import Tensor

from unsloth_pack.attention.backends import BACKENDS, choose_backend
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.row.packed_row import PackedRow


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    backend: str = "auto",
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention in which no token sees another document.

    Args:
        q_NHD: `[N, H, D]`, any strides with a contiguous last dimension.
        k_NKD, v_NKD: `[N, K, D]`; K divides H.
        row: the segments of the N tokens.
        backend: "auto", or a name in `BACKENDS`.
        sinks_H: `[H]`, the logit of each head's sink, where `options.sinks`. It may require a gradient.

    Returns:
        `[N, H, D]` in the dtype of `q_NHD`.

    Raises:
        BackendUnavailable: `backend` cannot run on this device, dtype, head size or options.
    """
    name, _ = choose_backend(backend, AttentionNeed(q_NHD.device.type, q_NHD.dtype, q_NHD.shape[-1], options))
    return BACKENDS[name].attend(q_NHD, k_NKD, v_NKD, row, options, sinks_H)
