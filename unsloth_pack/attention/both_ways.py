"""Blocks of a packed row whose tokens see each other in both directions, as those of images do in Gemma 3.

A causal call over the whole row comes first. In a second call the queries are the tokens of the blocks. Their
keys are the tokens of the document up to the end of the block, so that no mask is needed. What the second
call makes takes the place of what the first one has made of these tokens.

    row      a a i i i b j j | c k k     the images i, j and k of two documents
    queries      i i i   j j     k k
    keys     a a i i i                   copies: those of several images in a document overlap
             a a i i i b j j
                               c k k

With a sliding window a block has the keys that its first token can reach, and the window bounds how far back
its other tokens see. transformers means the same by masks: for full attention causal or of one block, for
sliding windows both of it and inside the window.

Shapes: N tokens of the row, Q in blocks, M keys of all blocks, H query heads, K key and value heads, D head
size, V that of v.

Source: Gemma 3 (Gemma Team 2025), as `create_masks_for_vision_model` of transformers.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from unsloth_pack.attention.backends import BACKENDS, backend_of_other_keys
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True, eq=False)
class _BlockRows:
    """Queries and keys of the second call.

    Args:
        queries: a segment for each block.
        keys: a segment for the keys of each block.
        query_places: `[Q]` int64; where the queries stand in the row.
        key_places: `[M]` int64; likewise of the keys.
    """

    queries: PackedRow
    keys: PackedRow
    query_places: Tensor
    key_places: Tensor

    @classmethod
    def of(cls, row: PackedRow, window: int | None) -> "_BlockRows":
        begins, ends = row.blocks.T
        firsts = row.starts[np.searchsorted(row.starts, begins, side="right") - 1]
        if window is not None:
            firsts = np.maximum(firsts, begins - window + 1)
        (queries, query_places), (keys, key_places) = (_runs(row, each, ends) for each in (begins, firsts))
        return cls(queries, keys, query_places, key_places)


def _runs(row: PackedRow, begins: np.ndarray, ends: np.ndarray) -> tuple[PackedRow, Tensor]:
    """Runs of tokens of a row as segments of a new one, and `[tokens]` int64 where they stand in the old."""
    places = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    lengths = tuple((ends - begins).tolist())
    return PackedRow.of_lengths(lengths, row.device), row.upload(np.concatenate(places))


def attend_in_blocks(
    out_NHV: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    backend: str,
) -> Tensor:
    """`[N, H, V]`: the output of causal attention, with that of the blocks of the row in its place.

    Args:
        out_NHV: of causal attention.
        q_NHD, k_NKD, v_NKV: as `attend` takes them.
        backend: that has made `out_NHV`.

    Raises:
        BackendUnavailable: no backend can attend so.
    """
    options = replace(options, causal=False)
    blocks = row.once(("blocks", options.window), lambda: _BlockRows.of(row, options.window))
    need = AttentionNeed(q_NHD.device.type, q_NHD.dtype, q_NHD.shape[-1], options, v_NKV.shape[-1])
    q_QHD = q_NHD.index_select(0, blocks.query_places)
    k_MKD, v_MKV = (x.index_select(0, blocks.key_places) for x in (k_NKD, v_NKV))
    chosen = BACKENDS[backend_of_other_keys(backend, need)]
    out_QHV = chosen.run(q_QHD, k_MKD, v_MKV, blocks.queries, options, keys=blocks.keys)
    return out_NHV.index_copy(0, blocks.query_places, out_QHV)
