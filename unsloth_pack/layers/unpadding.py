"""Find the padded batches that a decoder runs as packed rows, and say why others keep their padding.

TRL's trainers for preferences, rewards and policies, and plain SFT, pass padded batches. Padding is not
computed in training, nor without gradients where there is no cache.

Shapes: B rows of T tokens.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.utils import is_tracing

from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.modules import has_peft_hooks, no_compile
from unsloth_pack.packed_row.describe import LAST_POSITION, refuse_document_ids
from unsloth_pack.packed_row.labels import (
    PaddedBatch,
    is_one_document_a_row,
    is_one_run_a_row,
    padding_has_labels,
)
from unsloth_pack.packed_row.row import IGNORE_INDEX

if TYPE_CHECKING:
    from unsloth_pack.layers.decoder import FastDecoder


class Unpadding:
    """Finds the padded batches among the calls of one decoder. Copies and pickles start empty."""

    def __init__(self, why_never: str | None):
        self.why_never = why_never  # why batches keep their padding, whatever they are
        self.kept: Counter[str] = Counter()  # batches that kept their padding, by reason
        self._last: tuple[_CallTensors, PaddedBatch | None] | None = None

    def __reduce__(self) -> tuple[type["Unpadding"], tuple[str | None]]:
        return Unpadding, (self.why_never,)

    def find_batch(
        self,
        decoder: "FastDecoder",
        inputs: Mapping[str, Any],
        known: PaddedBatch | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> PaddedBatch | None:
        """Return the padded batch of a call that describes no packed row, or None if it keeps its padding.

        Waits once for numbers on a device, unless the batch is known or equals that of the call before, as
        where a trainer asks a reference model for log-probabilities.

        Args:
            inputs: the decoder's named arguments.
            known: the batch, where the host has described it.
            labels, shift_labels, ignore_index: of the loss that the model around the decoder computes.

        Raises:
            InputError: the mask numbers documents.
        """
        if self.why_never is not None or not _may_be_unpadded(decoder, inputs):
            return None
        if has_peft_hooks(decoder):
            self.kept["PEFT pairs rows with adapters, tasks or scalings, or measures them"] += 1
            return None
        tokens = inputs["inputs_embeds"] if inputs["input_ids"] is None else inputs["input_ids"]
        if known is not None:
            return known.on(tokens.device)
        tensors = _CallTensors(inputs, labels, shift_labels, ignore_index=ignore_index)
        if not tensors.labels_fit:
            return None
        if self._last is not None and tensors.is_same_as(self._last[0]):
            return self._last[1]
        batch = self._describe(decoder, tensors, tokens.device)
        # An index tensor from inference mode cannot be saved for a later backward pass
        self._last = None if torch.is_inference_mode_enabled() else (tensors, batch)
        return batch

    def _describe(
        self, decoder: "FastDecoder", tensors: "_CallTensors", device: torch.device
    ) -> PaddedBatch | None:
        mask_BT, positions_BT, has_labels = tensors.copy_to_host()
        if positions_BT is None:  # nothing else tells the documents apart
            refuse_document_ids(torch.from_numpy(mask_BT))
        real_BT = mask_BT == 1
        if not (real_BT | (mask_BT == 0)).all():
            return None
        if positions_BT is not None and not is_one_document_a_row(positions_BT, real_BT, LAST_POSITION):
            return None  # several documents a row, or an error: `describe_row` tells
        if (why := _why_keep_padding(decoder, real_BT, has_labels, tensors.has_ids)) is not None:
            self.kept[why] += 1
            return None
        by_length = not all(tables.is_static for tables in decoder.rotary_tables.values())
        return PaddedBatch.of_mask(real_BT, device, positions_BT, restarts=by_length)


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


def _why_keep_padding(
    decoder: "FastDecoder", real_BT: np.ndarray, has_labels: bool, has_ids: bool
) -> str | None:
    if not real_BT.any():
        return "the attention mask keeps no token"
    if not is_one_run_a_row(real_BT):
        return "the attention mask has padding between the tokens of a row"
    if has_labels:
        return "padding has labels, or predicts the first label of a row; set those labels to -100"
    finds_last = has_ids and decoder.config.pad_token_id is not None
    if decoder.answers_by_row is not None and not finds_last and not real_BT[:, -1].all():
        return "a row's answer is read at its last place, which is padding; give input_ids and a pad_token_id"
    return None


class _CallTensors:
    """The tensors of a call that say what is padding, and what a loss reads of it."""

    def __init__(self, inputs: Mapping[str, Any], *labels: Tensor | None, ignore_index: int):
        self.has_ids = inputs["input_ids"] is not None
        self._mask: Tensor = inputs["attention_mask"]
        self._positions: Tensor | None = inputs["position_ids"]
        self._labels = tuple(x if isinstance(x, Tensor) else None for x in labels)
        self._ignore_index = ignore_index
        self.labels_fit = all(x is None or x.shape == self._mask.shape for x in self._labels)
        tensors = (self._mask, self._positions, *self._labels)  # they are alive, so ids are unique
        self._ids = (*map(id, tensors), ignore_index, self.has_ids)
        self._versions = [None if x.is_inference() else x._version for x in tensors if x is not None]

    def is_same_as(self, other: "_CallTensors") -> bool:
        """Return whether these are the same tensors, unchanged."""
        is_same = self._ids == other._ids and self._versions == other._versions
        return is_same and None not in self._versions

    def copy_to_host(self) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Return in one transfer the mask and positions `[B, T]`, and whether a loss reads padding."""
        mask, real = self._mask, self._mask != 0
        flags = [
            padding_has_labels(labels, real, self._ignore_index, is_shifted)
            for labels, is_shifted in zip(self._labels, (False, True), strict=True)
            if labels is not None
        ]
        positions = [] if self._positions is None else [self._positions.expand_as(mask)]
        parts = [part.to(mask.device, torch.int64).reshape(-1) for part in (mask, *positions, *flags)]
        copies = HostCopy(torch.cat(parts)).read().cpu().split([part.numel() for part in parts])
        by_token = [numbers.reshape(mask.shape).numpy() for numbers in copies[: 1 + len(positions)]]
        has_labels = any(bool(flag) for flag in copies[len(by_token) :])
        return by_token[0], by_token[1] if positions else None, has_labels


class FastSequenceClassification(nn.Module):
    """Replaces a transformers class that answers by row (`LlamaForSequenceClassification`, ...)."""

    config: PreTrainedConfig

    @no_compile
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> object:
        """Answer as transformers does, at the last token of a row that is no `pad_token_id`.

        Masked padding gets that id first, so that no answer is read from padding.
        """
        pad_token_id = self.config.get_text_config().pad_token_id
        # A mask may also come ready for attention
        is_per_token = getattr(attention_mask, "shape", None) == getattr(input_ids, "shape", ())
        if pad_token_id is not None and input_ids is not None and is_per_token:
            input_ids = input_ids.masked_fill(attention_mask == 0, pad_token_id)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            **kwargs,
        )
