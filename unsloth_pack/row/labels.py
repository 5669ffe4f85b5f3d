"""The labels of a packed row: none may carry loss at the first token of a document or on padding.

A trainer counts labels before the model sees them, and divides the loss by that number. So labels that it has
counted and no loss sees are refused, or warned of where the model cannot know whether they were counted.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.host_copy import HostCopy
from unsloth_pack.row.packed_row import IGNORE_INDEX, PackedRow

logger = logging.getLogger("unsloth_pack")
_IN_THE_COLLATOR = f"set them to {IGNORE_INDEX} in the collator, as DataCollatorWithFlattening does"


def check_labels(name: str, labels: Any, shape: tuple[int, ...] | None, n_outputs: int | None) -> None:
    """Refuse labels that are not one token id for each token; values are looked at on a CPU only.

    Args:
        shape: (B, T) of a packed row; None of an ordinary batch, whose labels may be those of kept logits.
        n_outputs: of the head, None where it is not known.

    Raises:
        InputError: no tensor, another shape, or ids beyond the head.
    """
    if not isinstance(labels, Tensor):
        raise InputError(f"{name} are {type(labels).__name__}; give a tensor [B, T]")
    if shape is not None and labels.shape != shape:
        raise InputError(
            f"{name} have shape {list(labels.shape)}, the input ids {list(shape)}; give one label a token"
        )
    if n_outputs is None or labels.device.type != "cpu" or not labels.numel():
        return
    if int(labels.max()) >= n_outputs:
        raise InputError(
            f"{name} reach up to {int(labels.max())}, the head has {n_outputs} outputs; give smaller ids, or "
            f"{IGNORE_INDEX} for none"
        )


class CountedLabels:
    """Labels that a trainer may have counted, at places of a packed row where no loss sees them.

    Made before the decoder runs and read after it, so that labels on a device cost no wait before it.

    Args:
        labels: `[B, T]`, as they came.
    """

    def __init__(self, row: PackedRow, labels: Tensor):
        self._row = row
        self.is_on_host = labels.device.type == "cpu"  # where looking costs no wait
        if self.is_on_host:
            self._unscored = HostCopy(labels.reshape(-1)[torch.from_numpy(row.unscored_places)])
        else:
            self._unscored = HostCopy(labels.to(row.device).reshape(-1).index_select(0, row.unscored))

    @property
    def count(self) -> int:
        """How many labels no loss sees, though they mark a token to train on."""
        is_countable = self._row.unscored_places % self._row.shape[1] != 0  # nothing predicts column 0
        unscored: np.ndarray = self._unscored.read().numpy()
        return int((unscored[is_countable] != IGNORE_INDEX).sum())

    def refuse(self) -> None:
        """Refuse them: the trainer has counted them in `num_items_in_batch`.

        Raises:
            InputError: there are some.
        """
        if self.count:
            raise InputError(
                "labels at document starts are counted in num_items_in_batch but carry no loss; "
                f"{_IN_THE_COLLATOR}"
            )

    def warn(self) -> None:
        """Warn of them: the trainer may have counted them."""
        if count := self.count:
            logger.warning(
                "%d labels at document starts or on padding carry no loss; if the trainer has counted them, "
                "it divides by too many; %s",
                count,
                _IN_THE_COLLATOR,
            )


class ContradictingLabels:
    """Whether `labels` and `shift_labels` of one call are different; made and read as `CountedLabels`.

    Args:
        labels: `[B, T]`, masked where no loss may see them.
        shift_labels: `[B, T]`, likewise.
        ignore_index: the label of tokens without loss.
    """

    def __init__(self, labels: Tensor, shift_labels: Tensor, ignore_index: int):
        shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].to(shift_labels.device)
        self.is_on_host = shift_labels.device.type == "cpu"
        self._differ = HostCopy((shifted != shift_labels).any())

    def refuse(self) -> None:
        """Refuse them: which of the two is meant cannot be told.

        Raises:
            InputError: they are different.
        """
        if bool(self._differ.read()):
            raise InputError("labels and shift_labels contradict each other; leave shift_labels out")
