"""Attend over a packed row."""

from torch import Tensor

from unsloth_pack.attention.backends import BACKENDS, choose_backend
from unsloth_pack.attention.bidirectional_blocks import attend_in_blocks
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.packed_row.row import PackedRow


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    backend: str = "auto",
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend within the segments of a row: no token sees another segment.

    Args:
        q_NHD: `[N, H, D]`, any strides with a contiguous last dimension.
        k_NKD, v_NKV: `[N, K, D]` and `[N, K, V]`; K divides H. V is mostly D.
        row: the segments of the N tokens, and the blocks of them that see each other in both directions.
        backend: "auto", or a name in `BACKENDS`.
        sinks_H: `[H]`, the logit of each head's sink, where `options.sinks`. It may require a gradient.

    Returns:
        `[N, H, V]` in the dtype of `q_NHD`.

    Raises:
        BackendUnavailable: `backend` cannot run on this device, dtype, head size or options.
    """
    need = AttentionNeed(q_NHD.device.type, q_NHD.dtype, q_NHD.shape[-1], options, v_NKV.shape[-1])
    name, _ = choose_backend(backend, need)
    out_NHV = BACKENDS[name].run(q_NHD, k_NKD, v_NKV, row, options, sinks_H)
    if len(row.blocks):
        return attend_in_blocks(out_NHV, q_NHD, k_NKD, v_NKV, row, options, name)
    return out_NHV
