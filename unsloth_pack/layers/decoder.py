"""Run the decoder: a packed row through its layers, an ordinary batch through transformers' own forward.

Shapes: B rows of T tokens, V of all tokens stand for images, C features, P of a layer's own embeddings.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from unsloth_pack.cuda_graphs.shapes import Embedded
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.errors import InputError
from unsloth_pack.layers.forward_call import take_row
from unsloth_pack.layers.layer import GateAndUpPlan
from unsloth_pack.layers.leak_probe import DecoderProbe
from unsloth_pack.layers.mixers.cross_layer_kv import SharedKeysAndValues
from unsloth_pack.layers.peer_weights import PeerWeights
from unsloth_pack.layers.rotary import RotaryTables
from unsloth_pack.layers.unpadding import Unpadding
from unsloth_pack.losses.head import LOSS_KEYWORDS
from unsloth_pack.models.spec import DEEPSTACK, ArchSpec
from unsloth_pack.modules import no_compile
from unsloth_pack.packed_row.describe import refuse_document_ids
from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow


def take_visual_by_layer(row: PackedRow, kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """Take the tower's middle features out of a call: `[V, C]` for each of the first layers.

    Source: DeepStack (Meng et al. 2024).
    """
    kwargs.pop("visual_pos_masks", None)
    by_layer = kwargs.pop(DEEPSTACK, None) or []
    if len(by_layer) and row.visual is None:
        raise InputError(f"{DEEPSTACK} came without images; call the model with the head, with pixel_values")
    return by_layer


def add_visual(hidden_BTC: Tensor, row: PackedRow, features_VC: Tensor) -> Tensor:
    """Add these features to the hidden states of image tokens."""
    features_VC = features_VC.to(hidden_BTC.dtype)
    if len(features_VC) == row.n_tokens:  # of every token, as in a captured step
        return hidden_BTC + features_VC.view(hidden_BTC.shape)
    return hidden_BTC.flatten(0, 1).index_add(0, row.visual_ids, features_VC).view(hidden_BTC.shape)


logger = logging.getLogger("unsloth_pack")
# With checkpointing the backward pass runs all the same, and a trainer would not notice
_NOTHING_TRAINS = (
    "no weight of the decoder is trained; put an adapter on the model with FastLanguageModel.get_peft_model, "
    "or load it with full_finetuning=True"
)


class FastDecoder(nn.Module):
    """Replaces the class of a transformers decoder (`LlamaModel`, ...)."""

    config: PreTrainedConfig
    layers: nn.ModuleList
    get_input_embeddings: Callable[[], nn.Embedding]
    get_per_layer_inputs: Callable[[Tensor | None, Tensor | None], Tensor]
    project_per_layer_inputs: Callable[[Tensor, Tensor], Tensor]
    spec: ArchSpec
    norm_name: str  # of the last norm
    row_keywords: Collection[str]  # the arguments by which layers take the row
    rotary_tables: dict[str | None, RotaryTables]
    step_graphs: StepGraphs
    gate_and_up_plan: GateAndUpPlan
    unpadding: Unpadding
    why_no_branches: str | None  # why no segment of its rows may continue another
    leak_probe: DecoderProbe | None  # None where it is not wanted
    kernels_are_compiled: bool
    has_checked_trained_weights: bool
    has_checked_mask: bool
    answers_by_row: str | None  # class of the model around it, if that gives one answer a row
    peer_weights = PeerWeights()
    recompute_plan: Any = None  # where `use_gradient_checkpointing` is "auto"
    # Of "auto" and "offload", also while it is switched off: the layers' functions, and the plan
    own_checkpointing: tuple[list[Any], Any] | None = None

    @no_compile
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run transformers' decoder forward, or the packed one where the call describes packed documents.

        The model around the decoder passes `packed_row`: the row, the padded batch that becomes one, or None.
        """
        caching = {"past_key_values": past_key_values, "use_cache": use_cache}
        if "packed_row" not in kwargs:
            inputs: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **caching}
            inputs |= {"attention_mask": attention_mask, "position_ids": position_ids}
            unpad = partial(self.unpadding.find_batch, self, inputs)
            kwargs["packed_row"] = take_row(inputs, kwargs, unpad)
        row = kwargs.pop("packed_row")
        kwargs = {name: value for name, value in kwargs.items() if name not in LOSS_KEYWORDS}
        batch = row if isinstance(row, PaddedBatch) else None
        if batch is not None:
            row, input_ids, inputs_embeds = batch.row, batch.packed(input_ids), batch.packed(inputs_embeds)
            if kwargs.get("per_layer_inputs") is not None:
                kwargs["per_layer_inputs"] = batch.packed(kwargs["per_layer_inputs"])
        if row is not None:
            if batch is None:
                self._refuse_joined_answers(row)
                if row.parent is not None and (why := self.why_not_branched()):
                    raise InputError(f"parents of a packed row: {why}; give every document whole")
            if self.leak_probe is not None and self.leak_probe.is_due(self, row):
                self.leak_probe.look(self, row)
        if self._trains():
            self._warn_if_nothing_trains(inputs_embeds)
        if row is not None:
            output = self._run_packed_step(row, input_ids, inputs_embeds, kwargs)
            return output if batch is None else batch.padded(output)
        self._plan_recomputation(input_ids if inputs_embeds is None else inputs_embeds)
        self._refuse_unreadable_masks(attention_mask)
        if position_ids is not None and position_ids.dim() == 1:  # the one document of a row
            position_ids = position_ids[None]
        tokens = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        return super().forward(
            attention_mask=attention_mask, position_ids=position_ids, **tokens, **caching, **kwargs
        )

    def why_not_branched(self) -> str | None:
        """Return why no segment of a row may continue another at the moment, or None."""
        if hasattr(self.get_input_embeddings(), "neftune_noise_alpha"):
            return "NEFTune's noise depends on the length of a document"
        return self.why_no_branches

    def _refuse_joined_answers(self, row: PackedRow) -> None:
        n_rows, n_documents = row.shape[0], row.is_padding.count(False)
        if self.answers_by_row is not None and n_documents > n_rows:
            raise InputError(
                f"{self.answers_by_row} gives one answer a row, {n_rows} hold {n_documents} documents; "
                "give every document a row of its own, padded"
            )

    def _warn_if_nothing_trains(self, inputs_embeds: Tensor | None) -> None:
        """Warn once, except for embeddings from outside, where something may train."""
        if self.has_checked_trained_weights:
            return
        self.has_checked_trained_weights = True
        if inputs_embeds is None and not any(p.requires_grad for p in self.parameters()):
            logger.warning(_NOTHING_TRAINS)

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _plan_recomputation(self, inputs: Tensor | None) -> None:
        """Decide what a training step recomputes. Asks the driver for the free memory, which takes time."""
        if inputs is None or not self._trains():
            return
        tokens = inputs.shape[0] * inputs.shape[1]
        if self.recompute_plan is not None:
            self.recompute_plan.decide(tokens, inputs.device)
        embedding = self.get_input_embeddings()
        # PEFT's wrappers build their own `weight` at every access
        weight = getattr(embedding, "original_module", embedding).weight
        self.gate_and_up_plan.decide(tokens, weight.element_size(), inputs.device)

    def _refuse_unreadable_masks(self, attention_mask: object) -> None:
        """Refuse masks of an ordinary batch that the shared attention would misread; on a device once."""
        if self.config._attn_implementation != "sdpa":
            raise InputError(
                f"attn_implementation is {self.config._attn_implementation!r}, changed after the patch; "
                "undo the patch first, or set it back to 'sdpa'"
            )
        if getattr(attention_mask, "is_cuda", False):
            if self.has_checked_mask or not self.training:
                return
            self.has_checked_mask = True
        refuse_document_ids(attention_mask)

    def _run_packed_step(
        self,
        row: PackedRow,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        kwargs: Mapping[str, object],
    ) -> "PackedOutput":
        """Replay a step or run its layers, again with more recomputation if memory runs out."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("a model call takes either input_ids or inputs_embeds; give exactly one")
        inputs: Any = input_ids
        if inputs_embeds is not None:
            inputs = Embedded(inputs_embeds, take_visual_by_layer(row, dict(kwargs)))
        graphs = None if self._wants_more(kwargs, inputs_embeds) else self.step_graphs
        if self.step_graphs.why_never is not None:
            graphs = None
        router = "output_router_logits"
        wants_router = bool(kwargs.get(router, getattr(self.config, router, False)))
        step = None if graphs is None else graphs.replay(self, row, inputs, wants_router)
        while step is None:
            self._plan_recomputation(input_ids if inputs_embeds is None else inputs_embeds)
            if graphs is not None:
                step = graphs.run(self, row, inputs, wants_router)
                if step is not None:
                    break
            plan = self.recompute_plan if self._trains() else None
            try:
                with nullcontext() if graphs is None else graphs.tried(row):
                    outputs: PackedOutput = self._packed_forward(row, input_ids, inputs_embeds, **kwargs)
                if plan is None or plan.leaves_room(row.device) or not plan.lower():
                    return outputs
                del outputs
            except torch.OutOfMemoryError:
                if plan is None or not plan.lower():
                    raise
            torch.cuda.empty_cache()
        return PackedOutput(last_hidden_state=step.hidden, router_logits=step.router_logits)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: bool, **kwargs: bool) -> "FastDecoder":
        """Move or cast the weights as torch does; graphs then release those that lie elsewhere now."""
        move: Callable[..., FastDecoder] = super()._apply
        moved = move(fn, *args, **kwargs)
        if (graphs := vars(self).get("step_graphs")) is not None:  # PEFT builds new modules of this class
            graphs.let_go(self)
        return moved

    def _wants_more(self, kwargs: Mapping[str, object], inputs_embeds: Tensor | None) -> bool:
        """Return whether a call wants more than graphs return, or its layers take more inputs."""
        if inputs_embeds is not None and self.spec.per_layer_inputs:
            return True  # layers have embeddings of their own, of ids that are not known here
        known = {"output_router_logits", "return_dict", *([] if inputs_embeds is None else [DEEPSTACK])}
        others = (value for name, value in kwargs.items() if name not in known)
        has_others = any(value is not None and value is not False for value in others)
        return has_others or getattr(self.config, "output_hidden_states", False)

    @capture_outputs  # type: ignore[untyped-decorator]
    def _packed_forward(
        self,
        row: PackedRow,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        only: Collection[int] | None = None,
        **kwargs: object,
    ) -> "PackedOutput":
        """Run all layers, or only those of these numbers."""
        kwargs.pop("logits_to_keep", None)  # the model around the decoder cuts them
        hidden_BTC = self._embed(row, input_ids) if inputs_embeds is None else inputs_embeds
        multiplier = self.spec.embedding_multiplier
        if inputs_embeds is None:
            multiplier = multiplier or self.spec.token_multiplier
        if multiplier:
            hidden_BTC = hidden_BTC * getattr(self.config, multiplier)
        layer_inputs = self._build_layer_inputs(input_ids, hidden_BTC, kwargs)
        deepstack = take_visual_by_layer(row, kwargs)
        rotations = {kind: tables.for_row(row) for kind, tables in self.rotary_tables.items()}
        shared_inputs = dict.fromkeys(self.row_keywords, row) | kwargs
        for number, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            if only is not None and number not in only:
                continue
            kind = self.config.layer_types[number] if self.spec.rotary_per_layer_type else None
            inputs = layer_inputs[number] | shared_inputs
            out = layer(hidden_BTC, position_embeddings=rotations.get(kind), **inputs)
            hidden_BTC = out if isinstance(out, Tensor) else out[0]
            if number < len(deepstack):
                hidden_BTC = add_visual(hidden_BTC, row, deepstack[number])
        return PackedOutput(last_hidden_state=getattr(self, self.norm_name)(hidden_BTC))

    def _embed(self, row: PackedRow, input_ids: Tensor | None) -> Tensor:
        """Embed `[B, T, C]`; NEFTune by document, as longer inputs get less noise (Jain et al. 2023)."""
        embedding = self.get_input_embeddings()
        if input_ids is None or not hasattr(embedding, "neftune_noise_alpha"):
            embedded: Tensor = embedding(input_ids)
            return embedded
        documents = input_ids.reshape(1, -1).split(list(row.lengths), dim=1)
        return torch.cat([embedding(ids) for ids in documents], 1).view(*input_ids.shape, -1)

    def _build_layer_inputs(
        self, input_ids: Tensor | None, hidden_BTC: Tensor, kwargs: dict[str, Any]
    ) -> list[dict[str, object]]:
        """Build the keywords of each layer for a packed row; those that are not for layers leave `kwargs`."""
        shared: dict[str, object] = {}
        if self.spec.kv_sharing:
            self._refuse_reentrant_sharing()
            for of_an_assistant in ("shared_kv_states", "return_shared_kv_states"):  # None in other calls
                kwargs.pop(of_an_assistant, None)
            shared["shared_kv_states"] = SharedKeysAndValues()
        own: Sequence[Tensor | None] = [None] * len(self.layers)  # `[B, T, P]` of each layer
        if not self.spec.per_layer_inputs:
            return [shared] * len(own)
        embeddings: Tensor | None = kwargs.pop("per_layer_inputs", None)
        if self.config.hidden_size_per_layer_input:  # by transformers' own methods, which work by token
            if embeddings is None:
                embeddings = self.get_per_layer_inputs(input_ids, hidden_BTC)
            elif input_ids is not None:
                raise InputError("per_layer_inputs come with input_ids; give them with inputs_embeds only")
            own = self.project_per_layer_inputs(hidden_BTC, embeddings).unbind(2)
        return [{"per_layer_input": inputs} | shared for inputs in own]

    def embed_per_layer(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the layers' own embeddings, else looked up by embedding in the whole vocabulary."""
        if not (self.spec.per_layer_inputs and self.config.hidden_size_per_layer_input):
            return {}
        return {"per_layer_inputs": self.get_per_layer_inputs(input_ids, None)}

    def _refuse_reentrant_sharing(self) -> None:
        """Refuse checkpointing that keeps gradients for a layer's output alone, not for what it stores."""
        for layer in self.layers if self.training else ():
            options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
            if layer.gradient_checkpointing and options.get("use_reentrant"):
                raise InputError(
                    "use_reentrant=True loses the gradients of keys and values that layers share; set "
                    "gradient_checkpointing_kwargs={'use_reentrant': False}"
                )


def has_fast_decoder(model: nn.Module | None) -> bool:
    """Whether a model is patched, or has a patched model inside."""
    return model is not None and any(isinstance(module, FastDecoder) for module in model.modules())


@dataclass
class PackedOutput(MoeModelOutputWithPast):
    """A decoder's output for a packed row. Models around it may read `shared_kv_states`: there are none."""

    last_hidden_state: Any = None  # a tensor
    router_logits: Any = None
    shared_kv_states: None = None
