"""Which documents of a data set are held out of the training, to evaluate on them.

Documents with equal tokens and images are on the same side, wherever they stand. The choice
depends on the documents and the seed alone: not on their order, nor on how many processes read them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.image_columns import IMAGES, update_with_images
from unsloth_pack.data.mapped import scan
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

_BATCH = 1000  # documents whose tokens are read at a time
_HASH_BYTES = 16


def held_out(documents: datasets.Dataset, fraction: float, seed: int) -> np.ndarray:
    """`[documents]` bool: about this share of them, at least one and never all.

    Args:
        documents: `input_ids`.
        fraction: above 0 and below 1.

    Raises:
        InputError: all documents are equal, so that none could be held out.
    """
    hashes = _hashes(documents, seed)
    _, group_of, sizes = np.unique(hashes, return_inverse=True, return_counts=True)  # in a random order
    if len(sizes) < 2:
        raise InputError(
            f"eval_fraction is {fraction:g}, and all {len(hashes):,} documents hold the same tokens, so that "
            "none can be held out; give more data, or --eval_dataset",
            about="eval_fraction",
        )
    most = fraction * len(hashes)
    is_chosen = np.zeros(len(sizes), bool)
    chosen = 0
    for group, size in enumerate(sizes.tolist()):
        if chosen + size <= most:
            is_chosen[group] = True
            chosen += size
    if not chosen:
        is_chosen[np.argmin(sizes)] = True
    return is_chosen[group_of]


def _hashes(documents: datasets.Dataset, seed: int) -> np.ndarray:
    """`[documents]`: hashes of their tokens and images, whose order is another with each seed."""
    key = seed.to_bytes(8, "little")
    found = bytearray()
    columns = [name for name in ("input_ids", IMAGES) if name in documents.column_names]
    for table in scan(documents, columns, _BATCH):
        lists = table["input_ids"].combine_chunks()
        ids = lists.flatten().to_numpy()
        ends = np.cumsum(lists.value_lengths().to_numpy())
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            digest = hashlib.blake2b(ids[begin:end].tobytes(), digest_size=_HASH_BYTES, key=key)
            if IMAGES in columns:
                update_with_images(digest, table[IMAGES].slice(number, 1))
            found += digest.digest()
    return np.frombuffer(bytes(found), f"S{_HASH_BYTES}")
