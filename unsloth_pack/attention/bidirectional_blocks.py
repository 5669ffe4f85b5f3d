"""Attend in both directions within blocks of a packed row, as images do in Gemma 3.

After a causal call over the whole row, a second call replaces its output at the tokens of the blocks. The
keys of a block are the tokens of its document up to the block's end, so no mask is needed. Under a sliding
window a block has the keys that its first token can reach, and the window bounds how far back its other
tokens see. transformers means the same by masks: for full attention causal or of one block, for sliding
windows both of it and inside the window.

Shapes: N tokens of the row, Q in blocks, M keys of all blocks, H query heads, K key and value heads, D head
size, V that of v.

Source: Gemma 3 (Gemma Team 2025), as `create_masks_for_vision_model` of transformers.
"""

from dataclasses import replace

from torch import Tensor

from unsloth_pack.attention.backends import BACKENDS, choose_backend_for_other_keys
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.packed_row.images import BlockRows
from unsloth_pack.packed_row.row import PackedRow


def attend_in_blocks(
    out_NHV: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    backend: str,
) -> Tensor:
    """Replace the output of causal attention by `backend`, `[N, H, V]`, at the tokens of blocks.

    Raises:
        BackendUnavailable: no backend can attend so.
    """
    options = replace(options, causal=False)
    blocks = BlockRows.from_row(row, options.window)
    need = AttentionNeed(q_NHD.device.type, q_NHD.dtype, q_NHD.shape[-1], options, v_NKV.shape[-1])
    q_QHD = q_NHD.index_select(0, blocks.query_places)
    k_MKD, v_MKV = (x.index_select(0, blocks.key_places) for x in (k_NKD, v_NKV))
    chosen = BACKENDS[choose_backend_for_other_keys(backend, need)]
    out_QHV = chosen.run(q_QHD, k_MKD, v_MKV, blocks.queries, options, keys=blocks.keys)
    return out_NHV.index_copy(0, blocks.query_places, out_QHV)
