"""The causal language model's forward: a call enters, its row is described and checked, its loss is chosen.

Shapes: B rows of T tokens, C features, V outputs of the head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.layers.forward_slot import ForwardCall, ForwardSlot, images_in, trl_head_of
from unsloth_pack.layers.layer import OwnCheckpointing
from unsloth_pack.losses.contract import LabelledHead, Loss
from unsloth_pack.losses.cross_entropy import cross_entropy, loss_output
from unsloth_pack.losses.fusable import (
    has_own_loss,
    head_of,
    outputs_of_head,
    refuse_passed_over,
    why_head_not_fused,
    why_loss_not_fused,
)
from unsloth_pack.losses.trl_head import TrlHead, cut, load_balancing_loss
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.hooks import no_compile
from unsloth_pack.modules.walk import CountedParameters
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, row_from_call
from unsloth_pack.packed_row.labels import (
    ContradictingLabels,
    CountedLabels,
    PaddedBatch,
    check_labels,
    watch_gradient,
)
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

# The labels of a call of a causal language model.
#
# Shapes: B rows of T tokens, V outputs of the head.


class StepLabels:
    """The labels of a call: checked, and masked where no loss may see them. Made before the decoder runs.

    Args:
        model: a `FastCausalLM`.
        call: what belongs to the loss alone is taken out of its `rest`.
        labels: `[B, T]`, or None.
        asked_by_trl: whether one of TRL's trainers asks, which counts labels without telling the model.
    """

    def __init__(self, model: Any, call: ForwardCall, labels: Tensor | None, asked_by_trl: bool):
        self.ignore_index: int = call.rest.pop("ignore_index", IGNORE_INDEX)
        self.num_items = call.rest.pop("num_items_in_batch", None)
        self._model, self._row = model, call.row
        self._late: list[CountedLabels | ContradictingLabels] = []
        shape = None if call.row is None else call.row.shape
        n_outputs = None if has_own_loss(model) else outputs_of_head(model)

        def checked(name: str, given: Tensor | None) -> Tensor | None:
            return None if given is None else check_labels(name, given, shape, n_outputs, self.ignore_index)

        self.labels = checked("labels", labels)
        self.shift_labels = checked("shift_labels", call.rest.pop("shift_labels", None))
        if call.row is not None:
            self._mask(call.row, asked_by_trl)

    def shifted(self) -> Tensor:
        """`[B, T]`: of every token, the label that it predicts."""
        if self.shift_labels is not None:
            return self.shift_labels
        if self.labels is None:
            raise InputError("fused_lm_head=True scores labels, and there are none; give labels")
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]

    def as_given(self) -> dict[str, Any]:
        """What another forward gets for its loss."""
        given = {
            "labels": self.labels,
            "shift_labels": self.shift_labels,
            "num_items_in_batch": self.num_items,
            "ignore_index": None if self.ignore_index == IGNORE_INDEX else self.ignore_index,
        }
        return {name: value for name, value in given.items() if value is not None}

    def watch(self, logits: Tensor) -> None:
        """Look at the logits' gradient: the caller may compute a loss from them, with labels of its own."""
        if self._row is None or not (logits.requires_grad and self._model.training):
            return
        is_counted = self.num_items is not None and self.labels is None
        if logits.shape[:-1] == self._row.shape and (is_counted or self._is_first_look()):
            watch_gradient(self._row, logits, is_counted)

    def _is_first_look(self) -> bool:
        """Labels that nobody has counted are looked at in one step: on a device the look waits for it."""
        is_first = not self._model.boundary_labels_sought
        self._model.boundary_labels_sought = True
        return is_first

    def refuse(self) -> None:
        """After the decoder: refuse what could be known only now.

        Raises:
            InputError: labels of document starts that were counted; labels that contradict each other.
        """
        for check in self._late:
            check.refuse()

    def _mask(self, row: PackedRow, asked_by_trl: bool) -> None:
        if self.num_items is not None:
            if self.shift_labels is not None:  # trainers count these rather than `labels`
                counted = CountedLabels(
                    row, self.shift_labels, is_shifted=True, ignore_index=self.ignore_index
                )
                self._look(counted)
            elif self.labels is not None:
                self._look(CountedLabels(row, self.labels, ignore_index=self.ignore_index))
        elif asked_by_trl and self.labels is not None and self._model.training and self._is_first_look():
            CountedLabels(row, self.labels).warn()
        if self.labels is not None:
            self.labels = row.mask_labels(self.labels, self.ignore_index)
        if self.shift_labels is not None:
            self.shift_labels = row.mask_shifted_labels(self.shift_labels, self.ignore_index)
        if self.labels is not None and self.shift_labels is not None:
            self._look(ContradictingLabels(self.labels, self.shift_labels, self.ignore_index))

    def _look(self, check: CountedLabels | ContradictingLabels) -> None:
        """On the host at once, and on a device when the decoder has run."""
        if check.is_on_host:
            check.refuse()
        else:
            self._late.append(check)


class FastCausalLM(CountedParameters):
    """Takes the place of a transformers causal language model's class (`LlamaForCausalLM`, ...).

    Also of a model around a text model (`Gemma3ForConditionalGeneration`, ...), for rows of text alone.
    """

    config: PreTrainedConfig
    base_model: nn.Module
    loss_function: Callable[..., Tensor]
    get_decoder: Callable[[], nn.Module]
    get_output_embeddings: Callable[[], Any]
    disable_input_require_grads: Callable[[], None]
    spec: ArchSpec
    fast_decoder: FastDecoder  # no submodule of its own: it lies somewhere below
    is_wrapper: bool  # a model around a text model, as of vision and language
    training_loss: Loss
    boundary_labels_sought: bool  # whether labels that nobody has counted have been looked at

    @ForwardSlot
    @no_compile
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

        In training, with labels, the loss is computed with the head, and `logits` only if they are asked for,
        see `LossOutput`. The patch's report says where that is not so, and why.

        Args:
            input_ids: `[B, T]`; packed documents usually as one row `[1, T]`.
            labels: `[B, T]`; the first label of each document and those of padding carry no loss.
            packed_seq_lengths: the document lengths, see `describe_row`. `cu_seq_lens_q/k` with
                `max_length_q/k`, `seq_idx` and `position_ids` that restart describe a row too.
            seq_lengths: likewise, the column of packed data sets; named, so that trainers keep the column.

        Raises:
            InputError: descriptions of the row that disagree with each other or with its shape; a keyword
                that is nearly one of them; labels beyond the head; labels of document starts that are counted
                in `num_items_in_batch`; `labels` and `shift_labels` that differ.
        """
        kwargs |= {"packed_seq_lengths": packed_seq_lengths, "seq_lengths": seq_lengths}
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        inputs |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache}
        described = row_from_call(inputs, kwargs, partial(self._without_padding, inputs, labels, kwargs))
        for name in (*ROW_KEYWORDS, "packed_row"):
            kwargs.pop(name, None)
        call = ForwardCall(described, inputs, kwargs)
        if self.is_wrapper and described is not None:
            self._take_images(call)
        elif self.is_wrapper:
            self._look_for_boundaries(call)
        if call.row is not None:
            inputs["attention_mask"] = call.row.token_mask
            self._refuse_other_decoder()
        trl_head = None
        if kwargs.pop("fused_lm_head", False) and (trl_head := trl_head_of(self)) is None:
            raise InputError(
                "fused_lm_head=True, but no trainer has prepared this model; make it a new trainer"
            )
        step_labels = StepLabels(self, call, labels, asked_by_trl=trl_head is not None)
        if trl_head is not None:
            out = self._scored_for_trl(trl_head, call, step_labels)
        elif self._takes_fused_loss(call, step_labels, logits_to_keep):
            out = self._with_fused_loss(call, step_labels)
        else:
            out = self._with_logits(call, step_labels, logits_to_keep)
            has_loss = step_labels.labels is not None
            step_labels.watch(out[has_loss] if isinstance(out, tuple) else out.logits)
        step_labels.refuse()
        for lost in call.lost:
            lost.refuse()
        return out

    def _without_padding(
        self, inputs: dict[str, Any], labels: Any, rest: Mapping[str, Any], known: PaddedBatch | None
    ) -> PaddedBatch | None:
        """The padded batch of a call that describes no row, or None where it keeps its padding."""
        if self.is_wrapper and (not self._takes_images(rest) or inputs["input_ids"] is None):
            return None
        given = {name: rest[name] for name in ("shift_labels", "ignore_index") if name in rest}
        return self.fast_decoder.unpadding.batch_of(self.fast_decoder, inputs, known, labels, **given)

    def _takes_images(self, rest: Mapping[str, Any]) -> bool:
        """Whether a padded batch with these further arguments can be one packed row."""
        return not images_in(rest)

    def _take_images(self, call: ForwardCall) -> None:
        """Take the images of a row out of a call."""
        if given := images_in(call.rest):
            raise InputError(
                f"a packed row comes with {given[0]}; a {type(self).__name__} packs rows of text alone: "
                "give such examples unpacked"
            )

    def _look_for_boundaries(self, call: ForwardCall) -> None:
        """Look whether a call that is left alone holds a packed row that has lost its boundaries."""

    def _refuse_other_decoder(self) -> None:
        if self.get_decoder() is not self.fast_decoder:
            raise InputError(
                f"{type(self).__name__} has got another decoder since it was patched; call patch_model again"
            )

    def decoded(self, call: ForwardCall) -> Any:
        """The decoder's output; the call has been described."""
        inputs = dict(call.inputs)
        if self.is_wrapper and self.spec.placeholders and inputs["input_ids"] is not None:
            inputs["input_ids"] = self._without_placeholders(inputs["input_ids"])
        return self.fast_decoder(**inputs, packed_row=call.described, **call.rest | {"return_dict": True})

    def _without_placeholders(self, input_ids: Tensor) -> Tensor:
        """Token ids as a model of vision and language hands them to its text model, where nothing is seen."""
        for name in self.spec.placeholders:
            is_placeholder = input_ids == getattr(self.config, name)
            input_ids = input_ids.masked_fill(is_placeholder, self.config.get_text_config().pad_token_id)
        return input_ids

    def _is_left_alone(self, call: ForwardCall) -> bool:
        """Whether a call goes through a model around a text model as it is: images may come with it."""
        return self.is_wrapper and call.described is None

    def _for_theirs(self, call: ForwardCall, step_labels: StepLabels) -> dict[str, Any]:
        """The arguments of transformers' forward or of TRL's, which hand them on to the decoder."""
        arguments = {**call.inputs, **call.rest, **step_labels.as_given()}
        if not self._is_left_alone(call):  # where what lies before the decoder takes no row
            arguments["packed_row"] = call.described
        return arguments

    # A step of training: the loss alone

    def _takes_fused_loss(
        self, call: ForwardCall, step_labels: StepLabels, logits_to_keep: int | Tensor
    ) -> bool:
        """Whether a call is a training step whose loss can be computed with the head."""

        def asked(name: str) -> Any:
            value = call.rest.get(name)
            return getattr(self.config, name, None) if value is None else value

        if step_labels.labels is None or not (self.training and torch.is_grad_enabled()):
            return False
        if asked("return_dict") is False or self._wants_router(call):
            return False
        if self._is_left_alone(call):
            return False
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        why_not = why_loss_not_fused(self)
        if why_not is not None and self.training_loss is not cross_entropy:
            raise InputError(f"training_loss needs the head: {why_not}; set it back to cross_entropy")
        return keeps_all and why_not is None

    def _wants_router(self, call: ForwardCall) -> bool:
        """Whether a call asks for the logits of routers, and with them for their auxiliary loss."""
        asked = call.rest.get("output_router_logits")
        if asked is None:
            asked = getattr(self.config.get_text_config(), "output_router_logits", False)
        return bool(asked)

    def _with_fused_loss(self, call: ForwardCall, step_labels: StepLabels) -> Any:
        head = head_of(self, self.spec, self.is_wrapper)
        labelled = LabelledHead(head, step_labels.shifted(), step_labels.ignore_index)
        self._rehearse(call, partial(labelled.cross_entropy, num_items=step_labels.num_items))
        decoded = self.decoded(call)
        loss = self.training_loss(labelled, decoded.last_hidden_state, call.row, step_labels.num_items)
        return loss_output(loss, head, decoded, step_labels.watch)

    def _rehearse(self, call: ForwardCall, loss_of: Callable[[Tensor], Tensor]) -> None:
        """Have the kernels of a first step compiled side by side, but for those of a tower."""
        if call.described is not None:
            decoder = self.fast_decoder
            decoder.rehearsal.hold(decoder, call.described, loss_of, decoder.leak_probe)

    # TRL's trainers: scores of tokens

    def _scored_for_trl(self, trl_head: TrlHead, call: ForwardCall, step_labels: StepLabels) -> Any:
        call.inputs["use_cache"] = False
        why_not = trl_head.why_not or why_head_not_fused(self)
        if self._is_left_alone(call):
            why_not = why_not or "images may come with it"
        if why_not:
            refuse_passed_over(self, why_not)
            return trl_head.forward(**self._for_theirs(call, step_labels), fused_lm_head=True)
        text_config = self.config.get_text_config()
        if wants_router := self._wants_router(call):
            call.rest["output_router_logits"] = True
        head = head_of(self, self.spec, self.is_wrapper).at_temperature(trl_head.temperature)
        labelled = LabelledHead(head, step_labels.shifted(), step_labels.ignore_index)
        self._rehearse(call, lambda hidden_BTC: trl_head.scored(labelled, hidden_BTC).log_prob.sum())
        decoded = self.decoded(call)
        scores, mask = trl_head.scored(labelled, decoded.last_hidden_state), labelled.mask
        if step_labels.shift_labels is None:  # nothing follows the last token
            scores, mask = cut(scores, mask.shape[1] - 1), mask[:, :-1]
        aux_loss = None
        if wants_router:
            token_mask = call.inputs["attention_mask"]
            aux_loss = load_balancing_loss(decoded.router_logits, text_config, token_mask, mask.device)
        weight = getattr(text_config, "router_aux_loss_coef", 0.0)
        return trl_head.output(scores, mask, step_labels.num_items, aux_loss, weight)

    # Everything else: logits, as transformers makes them

    def _with_logits(self, call: ForwardCall, step_labels: StepLabels, logits_to_keep: int | Tensor) -> Any:
        if self.is_wrapper and call.described is not None:
            return self._text_with_logits(call, step_labels, logits_to_keep)
        return super().forward(**self._for_theirs(call, step_labels), logits_to_keep=logits_to_keep)

    def _text_with_logits(
        self, call: ForwardCall, step_labels: StepLabels, logits_to_keep: int | Tensor
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """A packed row through a model around a text model, past all that it does with images."""
        if wants_router := self._wants_router(call):
            call.rest["output_router_logits"] = True
        decoded = self.decoded(call)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(decoded.last_hidden_state[:, kept])
        logits = head_of(self, self.spec, self.is_wrapper).scaled(logits)
        loss = None
        if step_labels.labels is not None:
            vocab_size = self.config.get_text_config().vocab_size
            loss = self.loss_function(logits=logits, vocab_size=vocab_size, **step_labels.as_given())
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=decoded.hidden_states, attentions=decoded.attentions
        )
        if not wants_router:
            return output
        text_config = self.config.get_text_config()
        token_mask = call.inputs["attention_mask"]
        aux_loss = load_balancing_loss(decoded.router_logits, text_config, token_mask, logits.device)
        if loss is not None:
            output.loss = loss + text_config.router_aux_loss_coef * aux_loss
        return MoeCausalLMOutputWithPast(**output, aux_loss=aux_loss, router_logits=decoded.router_logits)

    # Generation

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. Older notebooks give what a chat template made, which was a tensor. So
        `inputs` or `input_ids` may be all that a tokenizer returns.
        """
        given = kwargs.get("input_ids", inputs)
        if isinstance(given, Mapping):
            inputs, kwargs = None, {**kwargs, **given}
        theirs: Any = super()
        return theirs.generate(inputs, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Where `generate_batch` enters: refused, since its thread would log an error and answer nothing."""
        raise InputError(
            "generate_batch keeps keys and values in pages, which a patched model does not read; call "
            "generate (a trainer with use_transformers_continuous_batching=False), or undo the patch first"
        )

    # Gradient checkpointing, as trainers switch it on

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
        """Trainers turn checkpointing on by themselves, and TRL's off and on again around every pass of its
        reference model: layers that offload or follow a plan go on so."""
        decoder = self.fast_decoder
        mode = OwnCheckpointing.of(decoder) or decoder.own_checkpointing
        if mode is None or not enable:
            decoder.recompute_plan = None
            theirs: Any = super()
            theirs._set_gradient_checkpointing(enable=enable, **options)
        else:
            mode.restore(decoder)
        decoder.own_checkpointing = mode

    def enable_input_require_grads(self) -> None:
        """Not where layers follow a plan: it needs no such hook, with which no step is captured."""
        self.disable_input_require_grads()  # transformers forgets the hooks of an earlier call
        if self.fast_decoder.recompute_plan is None:
            theirs: Any = super()
            theirs.enable_input_require_grads()
