"""Answer once per document: heads that classify a text, score it as a reward, or rank it.

Shapes: B rows of T tokens, N of all rows, D documents, C features, L labels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple

from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.layers.forward_call import take_row
from unsloth_pack.modules import no_compile
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow


class FastSequenceClassification(nn.Module):
    """Replaces a transformers class with one answer a row (`LlamaForSequenceClassification`, ...)."""

    config: PreTrainedConfig
    num_labels: int
    score: nn.Module
    loss_function: Callable[..., Tensor]
    get_decoder: Callable[[], FastDecoder]

    @no_compile
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: object = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        packed_seq_lengths: object = None,
        seq_lengths: object = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Answer every document of a packed row, or every row of a batch, at its last token.

        As in transformers, that is the last one that is not `pad_token_id`: where a text ends with its EOS
        and that pads too, the answer is read before it.

        Args:
            input_ids: `[B, T]`; packed documents usually as one row `[1, T]`.
            labels: `[D]`, or `[D, L]` for several labels a document, in the order of the documents; of an
                ordinary batch one for each row. The loss is that of transformers, a mean over documents.
                With `num_items_in_batch` a packed row's is its share of a mean over so many.
            packed_seq_lengths: the document lengths, see `describe_row`, which lists other descriptions.
            seq_lengths: likewise, the column of packed data sets; named, so that trainers keep the column.

        Returns:
            Logits `[D, L]`, and the loss where there are labels.

        Raises:
            InputError: descriptions of the row disagree, or labels do not fit its documents.
        """
        kwargs |= {"packed_seq_lengths": packed_seq_lengths, "seq_lengths": seq_lengths}
        inputs: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        inputs |= {"past_key_values": past_key_values, "use_cache": use_cache}
        decoder = self.get_decoder()
        row = take_row(inputs, kwargs, partial(decoder.unpadding.find_batch, decoder, inputs))
        kwargs["packed_row"] = row
        pad_token_id = self.config.get_text_config().pad_token_id
        if not isinstance(row, PackedRow):
            if (
                pad_token_id is not None
                and input_ids is not None
                and isinstance(attention_mask, Tensor)
                and attention_mask.shape == input_ids.shape  # it may also come ready for attention
            ):
                # So that no answer is read from masked padding
                inputs["input_ids"] = input_ids.masked_fill(attention_mask == 0, pad_token_id)
            output: SequenceClassifierOutputWithPast = super().forward(**inputs, labels=labels, **kwargs)
            return output
        if labels is not None:
            labels = _by_document(row, labels, self.num_labels)
        num_items = kwargs.pop("num_items_in_batch", None)
        decoded = decoder(**inputs, **kwargs)
        last_D = find_last_tokens(row, input_ids, pad_token_id)
        logits_DL = self.score(decoded.last_hidden_state.flatten(0, 1).index_select(0, last_D))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_DL, labels=labels, pooled_logits=logits_DL, config=self.config
            )
            if num_items is not None:
                loss = loss * (labels != IGNORE_INDEX).sum() / num_items
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits_DL,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
        )


def _by_document(row: PackedRow, labels: Tensor, n_labels: int) -> Tensor:
    """Return labels as `[D]` or `[D, L]`; a collator may have put a dimension for the one row in front."""
    shapes: list[tuple[int, ...]] = [(len(row.documents),), (len(row.documents), n_labels)]
    for shape in shapes:
        if labels.numel() == math.prod(shape):
            return labels.reshape(shape)
    problem = f"labels have shape {[*labels.shape]} and the row {len(row.documents)} documents"
    raise InputError(f"{problem}; give one label each")


def find_last_tokens(row: PackedRow, input_ids: Tensor | None, pad_token_id: int | None) -> Tensor:
    """Return `[D]` int64: of every document the last token, or the last that is not `pad_token_id`.

    A document of such tokens alone answers at its first token, as in transformers.
    """
    if input_ids is None or pad_token_id is None:
        return row.upload(row.last_tokens)
    places_N = torch.arange(row.n_tokens, device=row.device)
    places_N = places_N.masked_fill(input_ids.flatten() == pad_token_id, 0)
    segment_of_N = np.repeat(np.arange(len(row.lengths)), row.lengths)
    last = row.upload(row.starts).scatter_reduce(0, row.upload(segment_of_N), places_N, "amax")
    return last.index_select(0, row.upload(row.documents))
