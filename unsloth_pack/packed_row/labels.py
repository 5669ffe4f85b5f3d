"""Check and mask the labels of a packed row, and turn padded batches into packed rows.

No label at the first token of a document or on padding may carry loss. A trainer counts labels before the
model sees them and divides the loss by that number. So labels that it counted but that carry no loss are
refused, or cause a warning where the model cannot know whether they were counted.

A `PaddedBatch` becomes one packed row, without its padding:

    rows     a a a . .       places  0 1 2 5 6 7 8 9 13 14
             b b b b b       row     a a a b b b b b c  c
             . . . c c       lengths 3     5         2

Shapes: B rows of T tokens, N of them no padding.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from unsloth_pack.errors import InputError
from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

logger = logging.getLogger("unsloth_pack")
_REMEDY = f"set them to {IGNORE_INDEX} in the collator, as DataCollatorWithFlattening does"


def check_labels(
    name: str,
    labels: object,
    shape: tuple[int, ...] | None,
    n_outputs: int | None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return labels as int64 after checking them; only values on a CPU are read.

    Args:
        shape: (B, T) of a packed row; None for an ordinary batch, which may have other labels.
        n_outputs: of the head; None where it is unknown, or where labels may be something else than ids.

    Raises:
        InputError: no tensor, another shape, no whole numbers, or ids that the head does not have.
    """
    if not isinstance(labels, Tensor):
        raise InputError(f"{name} are {type(labels).__name__}; give a tensor [B, T]")
    if shape is not None and labels.shape != shape:
        raise InputError(
            f"{name} have shape {list(labels.shape)}, the input ids {list(shape)}; give one label a token"
        )
    if n_outputs is None:
        return labels
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise InputError(f"{name} are {labels.dtype}; give token ids, as whole numbers")
    labels = labels.long()
    if labels.device.type == "cpu" and labels.numel():
        low, high = labels.masked_fill(labels == ignore_index, 0).aminmax()
        if low < 0 or high >= n_outputs:
            raise InputError(
                f"{name} reach from {low} to {high}, the head has {n_outputs} outputs; give smaller ids, or "
                f"{ignore_index} for none"
            )
    return labels


@dataclass(frozen=True)
class DeferredCheck:
    """A count that is 0 in a right call, on its way from the device."""

    count: HostCopy
    message: str  # of the error; `{}` stands for the count

    @classmethod
    def start(cls, count: Tensor, message: str) -> list["DeferredCheck"]:
        """Check the count now if it is on the host, else return the check to run after the decoder.

        Raises:
            InputError: the count is on the host, and not 0.
        """
        check = cls(HostCopy(count), message)
        if count.device.type != "cpu":
            return [check]
        check.refuse()
        return []

    def refuse(self) -> None:
        """Refuse the call if the count is not 0."""
        if count := int(self.count.read()):
            raise InputError(self.message.format(count))


def refuse_counted_labels(
    row: PackedRow, labels: Tensor, is_shifted: bool, ignore_index: int
) -> list[DeferredCheck]:
    """Refuse unmasked labels `[B, T]` that a trainer counted, although they carry no loss."""
    message = "labels at document starts are counted in num_items_in_batch but carry no loss; "
    return DeferredCheck.start(_count_unscored(row, labels, is_shifted, ignore_index), message + _REMEDY)


def warn_of_counted_labels(row: PackedRow, labels: Tensor, ignore_index: int) -> None:
    """Warn of such labels where a trainer may have counted them; waits for the device."""
    if count := int(_count_unscored(row, labels, False, ignore_index)):
        logger.warning(
            "%d labels at document starts or on padding carry no loss; if the trainer has counted them, "
            "it divides by too many; %s",
            count,
            _REMEDY,
        )


def _count_unscored(row: PackedRow, labels: Tensor, is_shifted: bool, ignore_index: int) -> Tensor:
    places = row.places_before_unscored if is_shifted else row.predicted_unscored
    on_device = row.once(("countable", is_shifted), lambda: row.upload(places))
    return (labels.to(row.device).reshape(-1).index_select(0, on_device) != ignore_index).sum()


def refuse_contradicting_labels(
    labels: Tensor, shift_labels: Tensor, ignore_index: int
) -> list[DeferredCheck]:
    """Refuse `labels` and `shift_labels` `[B, T]`, both masked, that differ: which one counts is unclear."""
    shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].to(shift_labels.device)
    message = "labels and shift_labels contradict each other; leave shift_labels out"
    return DeferredCheck.start((shifted != shift_labels).any(), message)


def watch_gradient(row: PackedRow, logits: Tensor, is_counted: bool) -> None:
    """Detect labels at document starts that a loss outside the model trains, in its backward pass.

    Logits without a label get no gradient, so a gradient at the last token of a document shows that the next
    document's first token is trained.

    Args:
        logits: `[B, T, V]`, which require a gradient.
        is_counted: the caller says how many labels it has, as `Trainer` does even when it keeps the labels.
            Then such a gradient is refused, else it causes a warning: a loss without labels may have it.
    """
    if not len(row.predicted_unscored):
        return
    places = row.upload(row.predicted_unscored - 1)

    def look(grad: Tensor) -> None:
        if not bool(grad.reshape(-1, grad.shape[-1]).index_select(0, places.to(grad.device)).any()):
            return
        if is_counted:
            raise InputError(f"a loss outside of the model trains labels at document starts; {_REMEDY}")
        logger.warning("a loss outside of the model trains labels at document starts; %s", _REMEDY)

    logits.register_hook(look)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Locates the documents of a padded batch, and holds the packed row that they form."""

    row: PackedRow  # `[1, N]`, one document for each row of the batch that has a token
    places: np.ndarray  # `[N]` int64 on the host; where each token of the row stands in the flattened batch
    shape: tuple[int, int]  # (B, T) of the batch

    @classmethod
    def of_mask(
        cls,
        real: np.ndarray,
        device: torch.device,
        positions: np.ndarray | None = None,
        restarts: bool = False,
    ) -> "PaddedBatch":
        """Build the batch of a mask that keeps some token and for which `is_one_run_a_row` holds.

        Args:
            real: `[B, T]` bool, False on padding.
            positions: `[B, T]` int64, the rotary positions; None for transformers' 0 to T - 1, or with
                `restarts` for those that start at 0 in every document.
        """
        places = np.flatnonzero(real)
        lengths = tuple(int(length) for length in real.sum(axis=1) if length)
        if positions is not None:
            token_positions = positions.reshape(-1)[places]
        elif restarts:
            token_positions = np.concatenate([np.arange(length) for length in lengths])
        else:
            token_positions = places % real.shape[1]
        row = PackedRow(lengths, (False,) * len(lengths), token_positions, (1, len(places)), device)
        return cls(row, places, (real.shape[0], real.shape[1]))

    def on(self, device: torch.device) -> "PaddedBatch":
        """Return the batch for a model on `device`."""
        row = self.row.on(device)
        return self if row is self.row else PaddedBatch(row, self.places, self.shape)

    def packed(self, tokens: Tensor | None) -> Tensor | None:
        """Remove the padding: `[1, N, ...]` from `[B, T, ...]`."""
        if tokens is None:
            return None
        flat = tokens.flatten(0, 1)
        return (flat if self._is_full else flat.index_select(0, self._places_on_device()))[None]

    def padded(self, output: object) -> Any:
        """Put the padding back into a decoder's output, as zeros.

        Hidden states `[1, N, C]` become `[B, T, C]`, the routers' logits `[N, E]` become `[B * T, E]`.
        """
        return tree_map_only(Tensor, self._pad, output)

    def _pad(self, output: Tensor) -> Tensor:
        tokens = output if output.dim() == 2 else output[0]
        if not self._is_full:
            spread = tokens.new_zeros(self.shape[0] * self.shape[1], *tokens.shape[1:])
            tokens = spread.index_copy_(0, self._places_on_device(), tokens)
        return tokens if output.dim() == 2 else tokens.unflatten(0, self.shape)

    @property
    def _is_full(self) -> bool:
        """Return whether there is no padding."""
        return len(self.places) == self.shape[0] * self.shape[1]

    def _places_on_device(self) -> Tensor:
        return self.row.once("places in the padded batch", lambda: self.row.upload(self.places))


def is_one_run_a_row(real: np.ndarray) -> bool:
    """Return whether no row of a `[B, T]` bool mask has padding between its tokens."""
    begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
    return bool((begins.sum(axis=1) <= 1).all())


def is_one_document_a_row(positions: np.ndarray, real: np.ndarray, last: int) -> bool:
    """Return whether the positions `[B, T]` of each row's tokens rise by one within 0 to `last`."""
    both = real[:, 1:] & real[:, :-1]
    token_positions = positions[real]
    return bool(
        (np.diff(positions, axis=1)[both] == 1).all()
        and ((token_positions >= 0) & (token_positions <= last)).all()
    )


def padding_has_labels(labels: Tensor, real: Tensor, ignore_index: int, is_shifted: bool) -> Tensor:
    """Return, as a bool tensor, whether a loss reads the outputs at padding, where `real` `[B, T]` is False.

    It does where padding has one of the `labels` `[B, T]`, or predicts that of the token behind it.
    """
    is_label = labels.to(real.device) != ignore_index
    has_label = (is_label & ~real).any()
    return has_label if is_shifted else has_label | (is_label[:, 1:] & ~real[:, :-1]).any()
