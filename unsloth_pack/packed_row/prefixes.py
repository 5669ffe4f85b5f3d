"""Find the rows of a padded batch that begin alike, as answers to one prompt do.

Their common tokens are computed once: as a prefix, of which the rows are branches.

Shapes: B rows of T tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.packed_row.padded_batch import PaddedBatch

_LEAST_SAVED = 1 / 16  # of a batch's tokens: attention to a prefix has a price of its own

Groups = list[tuple[Sequence[int], int]]  # documents, and how many leading tokens they share


def first_differences(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return `[B, B]` int64: the first place at which two rows differ, or T. All padding is alike."""
    tokens_BT = ids_BT.masked_fill(mask_BT == 0, -1)
    differ_BBT = tokens_BT[:, None] != tokens_BT[None, :]
    return F.pad(differ_BBT, (0, 1), value=True).view(torch.uint8).argmax(dim=-1)


def share_prefixes(batch: PaddedBatch, differences_BB: np.ndarray) -> PaddedBatch:
    """Return the batch with shared prefixes, or the batch itself where that saves little.

    `differences_BB` is the result of `first_differences` on the host.
    """
    row = batch.row
    firsts, lengths = batch.places[row.starts], np.array(row.lengths)
    numbers, begins = np.divmod(firsts, batch.shape[1])  # rows of the batch, and where they have tokens
    common = differences_BB[np.ix_(numbers, numbers)] - begins[:, None]
    # Each keeps a token of its own. Equal tokens at other positions are others
    common = np.minimum(common, np.minimum(lengths[:, None], lengths[None, :]) - 1)
    positions = row.positions[row.starts]
    common = np.where(positions[:, None] == positions[None, :], common, 0)
    groups = group_by_prefix(common)
    saved = sum((len(documents) - 1) * n_shared for documents, n_shared in groups)
    return batch.share(groups) if saved >= _LEAST_SAVED * row.n_tokens else batch


def group_by_prefix(common: np.ndarray) -> Groups:
    """Divide documents into groups whose shared prefixes save many tokens.

    `common` `[documents, documents]` counts the leading tokens that two share. From the longest prefix to the
    shortest, the groups that have it join where that saves more.
    """
    n = len(common)
    first, n_shared, saved = np.arange(n), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    np.fill_diagonal(common, common.max(initial=0))
    for least in np.unique(common[common > 0])[::-1]:
        alike = (common >= least).argmax(axis=1)  # the first of the documents that share as many
        sizes = np.bincount(first, minlength=n)
        for number in np.flatnonzero(np.bincount(alike) > 1):
            joining = np.flatnonzero((alike == number) & (sizes * least > saved))
            together = (sizes[joining].sum() - 1) * least
            if together > saved[joining].sum():
                into = joining[0]
                first[np.isin(first, joining)] = into
                n_shared[into], saved[joining], saved[into] = least, 0, together
    return [(np.flatnonzero(first == number).tolist(), int(n_shared[number])) for number in np.unique(first)]
