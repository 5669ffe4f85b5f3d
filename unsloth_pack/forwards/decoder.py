"""The decoder forward for a packed row, and the seam by which a model call describes one.

An ordinary batch goes through transformers' own forward, masks and cache included.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from unsloth_pack.errors import InputError
from unsloth_pack.forwards.leak_probe import OwnProbe
from unsloth_pack.forwards.rotary import RotaryTables
from unsloth_pack.graphs.step_graphs import StepGraphs
from unsloth_pack.losses.cross_entropy import LOSS_KEYWORDS, FusedLoss, wants_loss_alone
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.walk import CountedParameters
from unsloth_pack.row.from_call import (
    ROW_KEYWORDS,
    CountedLabels,
    describe_row,
    keyword_meant,
    refuse_numbers,
)
from unsloth_pack.row.packed_row import PackedRow

logger = logging.getLogger("unsloth_pack")
# Under checkpointing the backward pass runs all the same, and a trainer goes on without a word.
_NOTHING_TRAINS = (
    "no weight of the decoder is trained; put an adapter on the model with FastLanguageModel.get_peft_model, "
    "or load it with full_finetuning=True"
)


class FastDecoder(nn.Module):
    """Takes the place of a transformers decoder's class (`LlamaModel`, ...)."""

    spec: ArchSpec
    rotary_tables: dict[str | None, RotaryTables]
    step_graphs: StepGraphs
    leak_probe: OwnProbe | None  # until it has passed, or is not wanted
    trained_weights_sought: bool
    numbers_sought: bool
    answers_by_row: str | None  # the model around it, where that makes one answer of all tokens of a row
    recompute_plan: Any = None  # where `use_gradient_checkpointing` is "auto"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' decoder forward, or the packed one where the call describes packed documents.

        Beside transformers' arguments it takes what `describe_row` takes.
        """
        if "packed_row" not in kwargs:
            kwargs["packed_row"] = row_of_call(
                input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, kwargs
            )
        for name in (*ROW_KEYWORDS, *LOSS_KEYWORDS):
            kwargs.pop(name, None)
        row = kwargs.pop("packed_row")
        if row is not None:
            self._refuse_joined_answers(row)
            if self.leak_probe is not None and self.leak_probe.is_due(self, row):
                self.leak_probe.look(self)
                self.leak_probe = None
        if self.training and torch.is_grad_enabled():
            self._seek_trained_weights(inputs_embeds)
        self._plan_recomputation(input_ids if inputs_embeds is None else inputs_embeds)
        if row is None:
            if self.config._attn_implementation != "sdpa":  # the masks of another would be misread
                raise InputError(
                    f"attn_implementation is {self.config._attn_implementation!r}, changed after the patch; "
                    "undo the patch first, or set it back to 'sdpa'"
                )
            self._seek_numbers(attention_mask)
            if position_ids is not None and position_ids.dim() == 1:  # the one document of a row
                position_ids = position_ids[None]
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("a model call takes either input_ids or inputs_embeds; give exactly one")
        if not self._asks_for_more(kwargs):
            hidden_BTC = self.step_graphs.run(self, row, input_ids)
            if hidden_BTC is not None:
                return MoeModelOutputWithPast(last_hidden_state=hidden_BTC)
        plan = self.recompute_plan if self.training and torch.is_grad_enabled() else None
        try:
            outputs = self._packed_forward(row, input_ids, inputs_embeds, **kwargs)
            if plan is None or plan.leaves_room(row.device) or not plan.lower():
                return outputs
            del outputs
        except torch.OutOfMemoryError:
            if plan is None or not plan.lower():
                raise
        torch.cuda.empty_cache()
        return self(input_ids, inputs_embeds=inputs_embeds, packed_row=row, **kwargs)

    def _refuse_joined_answers(self, row: PackedRow) -> None:
        n_rows, n_documents = row.shape[0], row.is_padding.count(False)
        if self.answers_by_row is not None and n_documents > n_rows:
            raise InputError(
                f"{self.answers_by_row} gives one answer a row, {n_rows} hold {n_documents} documents; "
                "give every document a row of its own, padded"
            )

    def _seek_trained_weights(self, inputs_embeds: Tensor | None) -> None:
        """Once: warn of a model of which nothing is trained, unless its embeddings come from outside."""
        if self.trained_weights_sought:
            return
        self.trained_weights_sought = True
        if inputs_embeds is None and not any(p.requires_grad for p in self.parameters()):
            logger.warning(_NOTHING_TRAINS)

    def _seek_numbers(self, attention_mask: Any) -> None:
        """Refuse a mask that numbers documents. On a device once, in training: a look waits for it."""
        if getattr(attention_mask, "is_cuda", False):
            if self.numbers_sought or not self.training:
                return
            self.numbers_sought = True
        refuse_numbers(attention_mask)

    def _asks_for_more(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call is to return more than the last hidden state, or its layers take more."""
        is_asked = any(value is not None and value is not False for value in kwargs.values())
        return is_asked or getattr(self.config, "output_hidden_states", False)

    def _plan_recomputation(self, inputs: Tensor | None) -> None:
        if (
            self.recompute_plan is not None
            and inputs is not None
            and self.training
            and torch.is_grad_enabled()
        ):
            self.recompute_plan.decide(inputs.shape[0] * inputs.shape[1], inputs.device)

    @capture_outputs
    def _packed_forward(
        self, row: PackedRow, input_ids: Tensor | None, inputs_embeds: Tensor | None, **kwargs: Any
    ) -> MoeModelOutputWithPast:
        hidden_BTC = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.spec.embedding_multiplier:
            hidden_BTC = hidden_BTC * getattr(self.config, self.spec.embedding_multiplier)
        rotations = {kind: tables.for_row(row) for kind, tables in self.rotary_tables.items()}
        for number, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            kind = self.config.layer_types[number] if self.spec.rotary_per_layer_type else None
            hidden_BTC = layer(hidden_BTC, position_embeddings=rotations[kind], packed_row=row, **kwargs)
        # router_logits stay None without experts
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_BTC))


class FastCausalLM(CountedParameters):
    """Takes the place of a transformers causal language model's class (`LlamaForCausalLM`, ...)."""

    spec: ArchSpec

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        packed_seq_lengths: Any = None,
        seq_lengths: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Logits, and the loss where labels are given.

        In training, with labels, the loss is computed with the head and `logits` only if they are asked for,
        see `LossOutput`; where something stands against that, the patch's report says what.

        Args:
            input_ids: `[B, T]`; packed documents usually as one row `[1, T]`.
            labels: `[B, T]`; the first label of each document and those of padding carry no loss.
            packed_seq_lengths: the document lengths, see `describe_row`; so may `cu_seq_lens_q/k` with
                `max_length_q/k`, `seq_idx`, or `position_ids` that restart, among the other arguments.
            seq_lengths: likewise, the column of packed data sets; named, so that trainers keep the column.

        Raises:
            InputError: descriptions of the row that disagree with each other or with its shape, or a keyword
                that is nearly one of them; labels that count boundary tokens in `num_items_in_batch`.
        """
        kwargs |= {"packed_seq_lengths": packed_seq_lengths, "seq_lengths": seq_lengths}
        row = row_of_call(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, kwargs, labels
        )
        counted = None
        if row is not None:
            attention_mask = row.token_mask
            if labels is not None:
                if kwargs.get("num_items_in_batch") is not None and labels.device.type != "cpu":
                    counted = CountedLabels(row, labels)
                labels = row.mask_labels(labels)
        if labels is not None and wants_loss_alone(self, logits_to_keep, kwargs):
            loss = FusedLoss(self, labels, kwargs)
            kwargs.pop("return_dict", None)
            out = loss.output(
                self.base_model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    past_key_values=past_key_values,
                    inputs_embeds=inputs_embeds,
                    use_cache=use_cache,
                    packed_row=row,
                    **kwargs,
                )
            )
        else:
            out = super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                packed_row=row,
                **kwargs,
            )
        if counted is not None:
            counted.refuse()
        return out

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
        """Trainers turn checkpointing on by themselves: layers that offload or follow a plan go on so."""
        layer = self.base_model.layers[0]
        is_own = layer.gradient_checkpointing and hasattr(layer._gradient_checkpointing_func, "recomputes")
        if not (enable and is_own):
            self.base_model.recompute_plan = None
            super()._set_gradient_checkpointing(enable=enable, **options)

    def enable_input_require_grads(self) -> None:
        """Not where layers follow a plan: it needs no such hook, with which no step is captured."""
        self.disable_input_require_grads()  # transformers forgets the hooks of an earlier call
        if self.base_model.recompute_plan is None:
            super().enable_input_require_grads()


def row_of_call(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    kwargs: dict[str, Any],
    labels: Tensor | None = None,
) -> PackedRow | None:
    """The packed row of a model call, or None where it is an ordinary batch.

    Raises:
        InputError: as `describe_row`; or documents packed into the continuation of a cache; ids that are no
            `[B, T]`; a keyword that is nearly one of those that describe a row.
    """
    for name in kwargs:
        if (meant := keyword_meant(name)) is not None:
            raise InputError(f"{name} is no argument of the model; do you mean {meant}?")
    if input_ids is not None and getattr(input_ids, "ndim", 0) != 2:
        found = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InputError(f"input_ids is {found}; give a tensor [B, T], of a packed row [1, T]")
    inputs = input_ids if input_ids is not None else inputs_embeds
    given = {name: kwargs.get(name) for name in ROW_KEYWORDS}
    is_explicit = any(value is not None for value in given.values())
    if inputs is None or (not is_explicit and (position_ids is None or inputs.shape[1] == 1)):
        return None
    if past_key_values is not None:
        continues = past_key_values.get_seq_length() > 0
        if continues and is_explicit:
            raise InputError("packed documents cannot continue a cache; pass past_key_values=None")
        # `generate` makes the masks beforehand where the cache is static; they say who sees whom
        if continues or (not is_explicit and _is_made_mask(attention_mask)):
            return None
    return describe_row(
        (inputs.shape[0], inputs.shape[1]),
        inputs.device,
        position_ids=position_ids,
        attention_mask=attention_mask,
        labels=labels,
        labels_counted=kwargs.get("num_items_in_batch") is not None,
        **given,
    )


def _is_made_mask(attention_mask: Any) -> bool:
    """Whether a mask is what attention takes, `[B, 1, T, S]` or one for each type of layer."""
    return isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 2) == 4
