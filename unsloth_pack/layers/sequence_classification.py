"""Classify sequences: one answer for each row, at its last token."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from unsloth_pack.modules import no_compile


class FastSequenceClassification(nn.Module):
    """Replaces a transformers class that answers by row (`LlamaForSequenceClassification`, ...)."""

    config: PreTrainedConfig

    @no_compile
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
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
