"""Find the padded batches that a decoder runs as packed rows, and say why others keep their padding.

TRL's trainers for preferences, rewards and policies, and plain SFT, pass padded batches. Padding is not
computed in training, nor without gradients where there is no cache.

Shapes: B rows of T tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import is_tracing

from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.modules import has_peft_hooks
from unsloth_pack.packed_row.describe import LAST_POSITION, is_ordinary_batch, refuse_document_ids
from unsloth_pack.packed_row.padded_batch import (
    PaddedBatch,
    is_one_run_a_row,
    padding_has_labels,
)
from unsloth_pack.packed_row.prefixes import first_differences, share_prefixes
from unsloth_pack.packed_row.row import IGNORE_INDEX

if TYPE_CHECKING:
    from unsloth_pack.layers.decoder import FastDecoder


class Unpadding:
    """Finds the padded batches among the calls of one decoder. Copies and pickles start empty."""

    def __init__(
        self, why_never: str | None, reads_last_place: bool = False, why_no_sharing: str | None = None
    ):
        self.why_never = why_never  # why batches keep their padding, whatever they are
        self.reads_last_place = reads_last_place  # of every row, where the head knows no padding
        self.why_no_sharing = why_no_sharing  # why rows never share a prefix
        self.kept: Counter[str] = Counter()  # batches that kept their padding, by reason
        self.unshared: Counter[str] = Counter()  # batches that were not looked at for prefixes, by reason
        self.tokens, self.shared_tokens = 0, 0  # of all batches, and those of them that others stood for
        # Of the call before: a key of its tensors, which stay alive so that ids are unique, and its batch
        self._last: tuple[list[object], list[Tensor | None], PaddedBatch | None] | None = None

    def __reduce__(self) -> tuple[type["Unpadding"], tuple[str | None, bool, str | None]]:
        return Unpadding, (self.why_never, self.reads_last_place, self.why_no_sharing)

    def find_batch(
        self,
        decoder: "FastDecoder",
        inputs: Mapping[str, Any],
        known: PaddedBatch | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        has_images: bool = False,
    ) -> PaddedBatch | None:
        """Return the padded batch of a call that describes no packed row, or None if it keeps its padding.

        Rows that begin with the same tokens share them, unless the call has images or no ids.

        Waits once for numbers on a device, unless the batch is `known` or equals that of the call before, as
        where a trainer asks a reference model for log-probabilities.
        """
        if self.why_never is not None or not _may_be_unpadded(decoder, inputs):
            return None
        if has_peft_hooks(decoder):
            self.kept["PEFT pairs rows with adapters, tasks or scalings, or measures them"] += 1
            return None
        tokens = inputs["inputs_embeds"] if inputs["input_ids"] is None else inputs["input_ids"]
        if known is not None:
            return known.on(tokens.device)
        mask, is_by_ids = inputs["attention_mask"], inputs["input_ids"] is not None
        ids = inputs["input_ids"] if self._may_share(decoder, is_by_ids, has_images) else None
        losses = [x if isinstance(x, Tensor) else None for x in (labels, shift_labels)]
        if any(x is not None and x.shape != mask.shape for x in losses):
            return None
        tensors = [ids, mask, inputs["position_ids"], *losses]
        describe = partial(self._describe, decoder, tensors, ignore_index, is_by_ids, tokens.device)
        present = [x for x in tensors if x is not None]
        # Tensors of inference mode have no version, and cannot be saved for a later backward pass
        if torch.is_inference_mode_enabled() or any(x.is_inference() for x in present):
            return describe()
        key = [*map(id, tensors), *(x._version for x in present), ignore_index, is_by_ids]
        if self._last is None or self._last[0] != key:
            self._last = key, tensors, describe()
        return self._last[2]

    def _may_share(self, decoder: "FastDecoder", is_by_ids: bool, has_images: bool) -> bool:
        if self.why_no_sharing is not None:
            return False
        why = decoder.why_not_branched()
        if has_images or not is_by_ids:
            why = "images come with it" if has_images else "it comes as embeddings"
        if why is not None:
            self.unshared[why] += 1
        return why is None

    def _describe(
        self,
        decoder: "FastDecoder",
        tensors: Sequence[Any],
        ignore_index: int,
        is_by_ids: bool,
        device: torch.device,
    ) -> PaddedBatch | None:
        """Describe a batch, by what comes to the host in one transfer.

        It is the mask, positions, whether padding has labels, and from where on each two rows differ.
        """
        ids, mask, positions, *losses = tensors
        parts = [mask] if positions is None else [mask, positions.expand_as(mask)]
        n_by_token = len(parts)
        for x, is_shifted in zip(losses, (False, True), strict=True):
            if x is not None:
                parts.append(padding_has_labels(x, mask != 0, ignore_index, is_shifted))
        n_flags = len(parts)
        if ids is not None and len(ids) > 1:
            parts.append(first_differences(ids.to(mask.device), mask))
        on_device = torch.cat([part.to(mask.device, torch.int64).reshape(-1) for part in parts])
        copies = HostCopy(on_device).read().cpu().split([part.numel() for part in parts])
        mask_BT, *others = (numbers.reshape(mask.shape).numpy() for numbers in copies[:n_by_token])
        positions_BT = others[0] if others else None
        if positions_BT is None:  # nothing else tells the documents apart
            refuse_document_ids(torch.from_numpy(mask_BT))
        real_BT = mask_BT == 1
        if not (real_BT | (mask_BT == 0)).all():
            return None
        if positions_BT is not None:
            known = positions_BT[real_BT]
            is_in_range = ((known >= 0) & (known <= LAST_POSITION)).all()
            if not (is_in_range and is_ordinary_batch(positions_BT, real_BT)):
                return None  # several documents a row, or an error: `describe_row` tells
        has_labels = any(bool(flag) for flag in copies[n_by_token:n_flags])
        if (why := self._why_keep_padding(decoder, real_BT, has_labels, is_by_ids)) is not None:
            self.kept[why] += 1
            return None
        by_length = not all(tables.is_static for tables in decoder.rotary_tables.values())
        batch = PaddedBatch.of_mask(real_BT, device, positions_BT, restarts=by_length)
        if len(copies) == n_flags:
            return batch
        shared = share_prefixes(batch, copies[-1].reshape(len(ids), len(ids)).numpy())
        self.tokens += batch.row.n_tokens
        self.shared_tokens += batch.row.n_tokens - shared.row.n_tokens
        return shared

    def _why_keep_padding(
        self, decoder: "FastDecoder", real_BT: np.ndarray, has_labels: bool, has_ids: bool
    ) -> str | None:
        if not real_BT.any():
            return "the attention mask keeps no token"
        if not is_one_run_a_row(real_BT):
            return "the attention mask has padding between the tokens of a row"
        if has_labels:
            return "padding has labels, or predicts the first label of a row; set those labels to -100"
        finds_last = has_ids and decoder.config.pad_token_id is not None
        if self.reads_last_place and not finds_last and not real_BT[:, -1].all():
            where = "a row's answer is read at its last place, which is padding"
            return f"{where}; give input_ids and a pad_token_id"
        return None


def _may_be_unpadded(decoder: "FastDecoder", inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch may be unpadded, judged without reading a number."""
    mask, positions, ids = (inputs[name] for name in ("attention_mask", "position_ids", "input_ids"))
    wants_cache = inputs["use_cache"]
    if wants_cache is None:  # a training step gets a cache only if it asks
        is_step = decoder.training and torch.is_grad_enabled()
        wants_cache = not is_step and getattr(decoder.config, "use_cache", False)
    if inputs["past_key_values"] is not None or wants_cache:
        return False
    if (ids is None) == (inputs["inputs_embeds"] is None):  # the decoder refuses it
        return False
    shape = (inputs["inputs_embeds"] if ids is None else ids).shape[:2]
    if not _holds_whole_numbers(mask) or mask.shape != shape or mask.numel() == 0:
        return False
    if mask.is_meta or is_tracing(mask):
        return False
    shapes = (shape, (1, shape[1]), shape[1:])
    return positions is None or (_holds_whole_numbers(positions) and positions.shape in shapes)


def _holds_whole_numbers(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
