"""Run a causal language model's call: describe its row, check its labels, choose its loss.

Shapes: B rows of T tokens, C features, V outputs of the head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import FastDecoder, PackedOutput
from unsloth_pack.layers.forward_call import (
    ForwardCall,
    ForwardSlot,
    StepLabels,
    name_images,
    read_trl_head,
    take_row,
)
from unsloth_pack.layers.kernel_warmup import compile_kernels
from unsloth_pack.losses.head import (
    LabelledHead,
    Loss,
    TrlHead,
    cross_entropy,
    first_tokens,
    loss_output,
    read_head,
    refuse_ignored_adapter,
    why_head_not_fused,
    why_loss_not_fused,
)
from unsloth_pack.losses.prepared import PreparedLoss, StepInputs
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import QuickWalks, no_compile
from unsloth_pack.packed_row.padded_batch import PaddedBatch


class FastCausalLM(QuickWalks):
    """Replaces the class of a transformers causal language model (`LlamaForCausalLM`, ...).

    Also of a model around a text model (`Gemma3ForConditionalGeneration`, ...), for rows of text alone.
    """

    config: PreTrainedConfig
    base_model: nn.Module
    loss_function: Callable[..., Tensor]
    get_decoder: Callable[[], nn.Module]
    get_output_embeddings: Callable[[], nn.Module]
    disable_input_require_grads: Callable[[], None]
    spec: ArchSpec
    fast_decoder: FastDecoder  # set past torch's registry: it is a submodule already
    is_wrapper: bool  # a model around a text model, as of vision and language
    logit_divisor: float
    logit_softcap: float | None
    training_loss: Loss | PreparedLoss
    has_checked_boundary_labels: bool
    n_weights: int | None  # without embeddings, once they are counted

    @ForwardSlot
    @no_compile
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        packed_seq_lengths: object = None,
        seq_lengths: object = None,
        parents: object = None,
        **kwargs: object,
    ) -> Any:
        """Compute logits, and the loss where there are labels.

        In training with labels, the loss is computed with the head, and `logits` only on request, see
        `LossOutput`. The patch's report says where that is not so, and why.

        Args:
            input_ids: `[B, T]`; packed documents usually as one row `[1, T]`.
            labels: `[B, T]`; the first label of each document and those of padding carry no loss.
            packed_seq_lengths: the document lengths, see `describe_row`. `cu_seq_lens_q/k` with
                `max_length_q/k`, `seq_idx` and `position_ids` that restart describe a row too.
            seq_lengths: likewise, the column of packed data sets; named, so that trainers keep the column.
            parents: for each document of `packed_seq_lengths` the one that it continues, or -1. The parent's
                last token predicts its first, in the loss; the logits stay those of every token.

        Raises:
            InputError: descriptions of the row disagree, or labels do not fit the row or the head.
        """
        kwargs |= {"packed_seq_lengths": packed_seq_lengths, "seq_lengths": seq_lengths, "parents": parents}
        inputs: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        inputs |= {"past_key_values": past_key_values, "use_cache": use_cache}
        described = take_row(inputs, kwargs, partial(self._find_batch, inputs, labels, kwargs))
        call = ForwardCall(described, inputs, kwargs)
        if self.is_wrapper and described is not None:
            self._take_images(call)
        elif self.is_wrapper:
            self._check_boundaries(call)
        if call.row is not None:
            inputs["attention_mask"] = call.row.token_mask
            if self.get_decoder() is not self.fast_decoder:
                raise InputError(f"{type(self).__name__} has got another decoder; call patch_model again")
        trl_head = None
        if kwargs.pop("fused_lm_head", False) and (trl_head := read_trl_head(self)) is None:
            raise InputError("fused_lm_head=True, but no trainer prepared this model; build a new trainer")
        step_labels = StepLabels(self, call, labels, from_trl=trl_head is not None)
        out: Any
        if trl_head is not None:
            out = self._score_for_trl(trl_head, call, step_labels)
        elif self._takes_fused_loss(call, step_labels, logits_to_keep):
            out = self._compute_fused_loss(call, step_labels)
        else:
            if self.is_wrapper and described is not None:
                out = self._compute_text_logits(call, step_labels, logits_to_keep)
            else:
                arguments = self._build_arguments(call, step_labels)
                out = super().forward(**arguments, logits_to_keep=logits_to_keep)
            has_loss = step_labels.labels is not None
            step_labels.watch(out[has_loss] if isinstance(out, tuple) else out.logits)
        call.check_counts()
        return out

    def _find_batch(
        self,
        inputs: dict[str, Any],
        labels: Tensor | None,
        rest: Mapping[str, Any],
        known: PaddedBatch | None,
    ) -> PaddedBatch | None:
        """Return the padded batch of a call that describes no row, or None where it keeps its padding."""
        if self.is_wrapper and (not self._takes_images(rest) or inputs["input_ids"] is None):
            return None
        options = {name: rest[name] for name in ("shift_labels", "ignore_index") if name in rest}
        options["has_images"] = bool(name_images(rest))
        return self.fast_decoder.unpadding.find_batch(self.fast_decoder, inputs, known, labels, **options)

    def _takes_images(self, rest: Mapping[str, object]) -> bool:
        """Return whether a padded batch with these further arguments can become one packed row."""
        return not name_images(rest)

    def _take_images(self, call: ForwardCall) -> None:
        """Move the images of a row out of a call's `rest`."""
        if names := name_images(call.rest):
            raise InputError(
                f"a packed row comes with {names[0]}; a {type(self).__name__} packs rows of text alone: "
                "give such examples unpacked"
            )

    def _check_boundaries(self, call: ForwardCall) -> None:
        """Check whether an unpacked call holds a packed row that lost its boundaries."""

    def run_decoder(self, call: ForwardCall) -> PackedOutput:
        """Run the decoder on a call whose row is described."""
        inputs = dict(call.inputs)
        if self.is_wrapper and self.spec.placeholders and inputs["input_ids"] is not None:
            # As a model of vision and language does for its text model
            for name in self.spec.placeholders:
                is_placeholder = inputs["input_ids"] == getattr(self.config, name)
                padding = self.config.get_text_config().pad_token_id
                inputs["input_ids"] = inputs["input_ids"].masked_fill(is_placeholder, padding)
        rest = call.rest | {"return_dict": True}
        output: PackedOutput = self.fast_decoder(**inputs, packed_row=call.described, **rest)
        return output

    def encode_once(self, call: ForwardCall) -> None:
        """Compute what every pass over a call computes alike: the features of images that nothing changes."""

    def _is_unchanged(self, call: ForwardCall) -> bool:
        """Return whether a call runs through the model around a text model unchanged, perhaps with images."""
        return self.is_wrapper and call.described is None

    def _build_arguments(self, call: ForwardCall, step_labels: StepLabels) -> dict[str, object]:
        """Build the arguments of transformers' or TRL's forward, which passes them on to the decoder."""
        arguments = {**call.inputs, **call.rest, **step_labels.as_arguments()}
        if not self._is_unchanged(call):  # there the model around the decoder takes no row
            arguments["packed_row"] = call.described
        return arguments

    def _takes_fused_loss(
        self, call: ForwardCall, step_labels: StepLabels, logits_to_keep: int | Tensor
    ) -> bool:
        """Return whether a call is a step whose loss can be computed with the head.

        A loss that is prepared has to be, in every call, and so has that of labels in branches: see
        `PackedRow.before_next_token`.
        """
        is_training = self.training and torch.is_grad_enabled()
        has_to_be = call.has_branches or isinstance(self.training_loss, PreparedLoss)
        if step_labels.labels is None or not (is_training or has_to_be):
            return False
        why_not = self._why_needs_logits(call, logits_to_keep) or why_loss_not_fused(self)
        if why_not is None:
            return True
        if self.training_loss is not cross_entropy:
            raise InputError(f"training_loss needs the head: {why_not}; set it back to cross_entropy")
        call.refuse_branches(why_not)
        return False

    def _why_needs_logits(self, call: ForwardCall, logits_to_keep: int | Tensor) -> str | None:
        """Return why a call has to compute logits, or None."""
        return_dict = call.rest.get("return_dict")
        return_dict = getattr(self.config, "return_dict", None) if return_dict is None else return_dict
        if return_dict is False:
            return "return_dict is False"
        if self._wants_router(call):
            return "output_router_logits is on"
        if self._is_unchanged(call):
            return "images may come with an unpacked batch"
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        return None if keeps_all else "logits_to_keep leaves logits out"

    def _wants_router(self, call: ForwardCall) -> bool:
        """Return whether a call asks for the routers' logits, and so for their auxiliary loss."""
        is_wanted = call.rest.get("output_router_logits")
        if is_wanted is None:
            is_wanted = getattr(self.config.get_text_config(), "output_router_logits", False)
        return bool(is_wanted)

    def _compute_fused_loss(self, call: ForwardCall, step_labels: StepLabels) -> Any:
        head = read_head(self)
        labelled = LabelledHead(head, step_labels.shift(), step_labels.ignore_index)
        self._warm_up_kernels(call, partial(labelled.cross_entropy, num_items=step_labels.num_items))
        loss_of = self.training_loss
        if isinstance(loss_of, PreparedLoss):
            loss_of = loss_of.prepare(StepInputs(self, call, labelled))
        decoded = self.run_decoder(call)
        hidden_BTC = call.before_next_token(decoded.last_hidden_state)
        loss = loss_of(labelled, hidden_BTC, call.row, step_labels.num_items)
        return loss_output(loss, head, decoded, step_labels.watch)

    def _warm_up_kernels(self, call: ForwardCall, loss_of: Callable[[Tensor], Tensor]) -> None:
        """Compile the kernels of a first step side by side, those of a tower excepted."""
        decoder = self.fast_decoder
        is_first = not decoder.kernels_are_compiled and decoder.training and torch.is_grad_enabled()
        if is_first and call.described is not None:
            decoder.kernels_are_compiled = True
            compile_kernels(decoder, call.described, loss_of, decoder.leak_probe)

    def _score_for_trl(self, trl_head: TrlHead, call: ForwardCall, step_labels: StepLabels) -> object:
        call.inputs["use_cache"] = False
        why_not = trl_head.why_not or why_head_not_fused(self)
        if self._is_unchanged(call):
            why_not = why_not or "images may come with it"
        if why_not:
            call.refuse_branches(why_not)
            refuse_ignored_adapter(self, why_not)
            return trl_head.forward(**self._build_arguments(call, step_labels), fused_lm_head=True)
        if wants_router := self._wants_router(call):
            call.rest["output_router_logits"] = True
        head = read_head(self).at_temperature(trl_head.temperature)
        labelled = LabelledHead(head, step_labels.shift(), step_labels.ignore_index)
        self._warm_up_kernels(call, lambda hidden_BTC: trl_head.score(labelled, hidden_BTC).log_prob.sum())
        decoded = self.run_decoder(call)
        hidden_BTC = call.before_next_token(decoded.last_hidden_state)
        scores, mask = trl_head.score(labelled, hidden_BTC), labelled.mask
        if step_labels.shift_labels is None:  # nothing follows the last token
            scores, mask = first_tokens(scores, mask.shape[1] - 1), mask[:, :-1]
        aux_loss = self._compute_aux_loss(call, decoded, mask.device) if wants_router else None
        weight = getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0)
        return trl_head.build_output(scores, mask, step_labels.num_items, aux_loss, weight)

    def _compute_text_logits(
        self, call: ForwardCall, step_labels: StepLabels, logits_to_keep: int | Tensor
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Run a packed row through a model around a text model, past its handling of images."""
        if wants_router := self._wants_router(call):
            call.rest["output_router_logits"] = True
        decoded = self.run_decoder(call)
        places = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(decoded.last_hidden_state[:, places])
        logits = read_head(self).scaled(logits)
        loss = None
        if step_labels.labels is not None:
            vocab_size = self.config.get_text_config().vocab_size
            loss = self.loss_function(logits=logits, vocab_size=vocab_size, **step_labels.as_arguments())
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=decoded.hidden_states, attentions=decoded.attentions
        )
        if not wants_router:
            return output
        aux_loss = self._compute_aux_loss(call, decoded, logits.device)
        if loss is not None:
            output.loss = loss + self.config.get_text_config().router_aux_loss_coef * aux_loss
        return MoeCausalLMOutputWithPast(**output, aux_loss=aux_loss, router_logits=decoded.router_logits)

    def _compute_aux_loss(self, call: ForwardCall, decoded: PackedOutput, device: torch.device) -> Tensor:
        """Compute the auxiliary loss of routed experts as transformers does."""
        config, mask = self.config.get_text_config(), call.inputs["attention_mask"]
        n_experts = getattr(config, "num_experts", None) or config.num_local_experts
        loss = load_balancing_loss_func(decoded.router_logits, n_experts, config.num_experts_per_tok, mask)
        return torch.as_tensor(loss, device=device)  # transformers gives 0 for no layers

    def generate(self, inputs: object = None, *args: object, **kwargs: object) -> object:
        """Generate as transformers does; `inputs` or `input_ids` may also be a tokenizer's whole output.

        Older notebooks pass the output of a chat template, which used to be a tensor.
        """
        tokenized = kwargs.get("input_ids", inputs)
        if isinstance(tokenized, Mapping):
            inputs, kwargs = None, {**kwargs, **tokenized}
        theirs: Any = super()
        return theirs.generate(inputs, *args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As transformers', but count once what its trainers ask for in every step, to estimate FLOP."""
        theirs: Any = super()
        if only_trainable or not exclude_embeddings:
            n_weights: int = theirs.num_parameters(only_trainable, exclude_embeddings)
            return n_weights
        if self.n_weights is None:
            self.n_weights = theirs.num_parameters(exclude_embeddings=True)
        return self.n_weights

    def init_continuous_batching(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse `generate_batch`, whose thread would log an error and answer nothing."""
        raise InputError(
            "a patched model does not run generate_batch; call generate, or undo the patch first"
        )

    def _set_gradient_checkpointing(self, enable: bool = True, **options: object) -> None:
        """Switch checkpointing; layers that offload or follow a plan keep doing so.

        Trainers switch it on by themselves, and TRL off and on again around each pass of its reference model.
        """
        decoder = self.fast_decoder
        if decoder.own_checkpointing is None or not enable:
            decoder.recompute_plan = None
            theirs: Any = super()
            theirs._set_gradient_checkpointing(enable=enable, **options)
            return
        functions, decoder.recompute_plan = decoder.own_checkpointing
        for layer, function in zip(decoder.layers, functions, strict=True):
            vars(layer).update(gradient_checkpointing=True, _gradient_checkpointing_func=function)

    def enable_input_require_grads(self) -> None:
        """Set transformers' hook unless layers follow a plan, which needs none: it prevents capture."""
        self.disable_input_require_grads()  # transformers loses track of an earlier call's hooks
        if self.fast_decoder.recompute_plan is None:
            theirs: Any = super()
            theirs.enable_input_require_grads()
