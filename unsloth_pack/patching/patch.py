"""Patching a transformers model in place: on the instance, with a report, undone exactly.

A patched module keeps its parameters, attributes, hooks and name. Only its `__class__` changes, to a subclass
whose forward comes before transformers' own. So gradient checkpointing, `state_dict` keys, recorded hidden
states and deep copies work as before, with and without PEFT.

Outside the model, patching changes trainers and PEFT, see `prepare_trainers`.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
)

from unsloth_pack.attention.backends import requested_backend
from unsloth_pack.errors import InputError
from unsloth_pack.forwards.activations import FAST_ACTIVATIONS
from unsloth_pack.forwards.causal_lm import FastCausalLM
from unsloth_pack.forwards.decoder import FastDecoder
from unsloth_pack.forwards.door import DOOR_ATTRIBUTES, let_in, set_forwards
from unsloth_pack.forwards.experts import FastExperts, FastExpertsLora
from unsloth_pack.forwards.gate_and_up import GateAndUpPlan
from unsloth_pack.forwards.layer import FastLayer, is_plain
from unsloth_pack.forwards.leak_probe import OwnProbe
from unsloth_pack.forwards.mixers import Choice, Request
from unsloth_pack.forwards.mlp import FastMLP
from unsloth_pack.forwards.norm import NORMS
from unsloth_pack.forwards.rehearsal import Rehearsal
from unsloth_pack.forwards.rotary import RotaryTables, rotary_module, rotary_tables
from unsloth_pack.forwards.row_answers import FastRowAnswers
from unsloth_pack.forwards.trained_tokens import FastTrainedTokens, trains_tokens
from unsloth_pack.forwards.vision_lm import FastVisionLM
from unsloth_pack.graphs.step_graphs import StepGraphs
from unsloth_pack.lora.layers import FastLoraLinear
from unsloth_pack.losses.cross_entropy import cross_entropy
from unsloth_pack.models import spec_of, vision_spec_of
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.models.vision_spec import VisionSpec
from unsloth_pack.modules.walk import ListedModules, ModuleWalk
from unsloth_pack.patching.applied import PATCH, Patch
from unsloth_pack.patching.classes import _new as _new  # which pickles of earlier releases name here
from unsloth_pack.patching.classes import is_made
from unsloth_pack.patching.decoder_parts import DecoderParts, mixers_by_layer
from unsloth_pack.patching.refusals import refuse_own_code, refuse_unknown_parts, refuse_what_would_leak
from unsloth_pack.patching.report import report_of, say_step
from unsloth_pack.patching.towers import let_blocks_be_captured, swap_tower
from unsloth_pack.patching.trainers import prepare_trainers

logger = logging.getLogger("unsloth_pack")
_ANSWER_BY_ROW = (GenericForQuestionAnswering, GenericForSequenceClassification)


def patch_model(model: nn.Module, attn_backend: str = "auto", unpad: bool = True) -> Patch:
    """Patch a transformers model: it takes packed rows, and its layers run fused where they can.

    Args:
        model: a supported transformers model, or a PEFT model around one, before or after training.
        attn_backend: "auto" (the fastest that can run), "flash", "xformers", "triton" or "sdpa"; the
            environment variable `UNSLOTH_PACK_ATTN` overrides it.
        unpad: run a padded batch as one packed row, without its padding, in training and where no cache is
            made.

    Returns:
        The patch, with its `report` and `undo()`. A model that is patched already is patched anew.

    Raises:
        UnsupportedArchitecture: no patch is declared for the model type.
        BackendUnavailable: the backend that was asked for cannot run here.
        InputError: the documents of a packed row could not be kept apart in this model; another patch is in
            force on a part of it, which two models share.
    """
    if not isinstance(unpad, bool):
        raise InputError(f"unpad is {unpad!r}; give True or False")
    base = _transformers_model(model)
    decoder = base.get_decoder()
    spec = spec_of(decoder.config.model_type)
    earlier = base.__dict__.get(PATCH)
    refuse_what_would_leak(model, decoder)
    _refuse_shared_parts(base, earlier)
    for mixer, one in mixers_by_layer(decoder, spec):
        refuse_unknown_parts(mixer, one, spec)
    backend, source = requested_backend(attn_backend)
    embedding = decoder.get_input_embeddings().weight
    request = Request(embedding.device.type, embedding.dtype, backend, source, decoder.config)
    choices = [mixer.choose(one, spec, request) for mixer, one in mixers_by_layer(decoder, spec)]
    refuse_own_code([base, decoder, *filter(None, [rotary_module(decoder, spec)])])
    set_before = set_forwards(base)
    if earlier is not None:  # only now, so that a refusal above leaves the earlier patch in place
        earlier.undo()
    _warn_of_slow_layers(spec, choices)
    parts = DecoderParts.of(decoder, spec, choices)
    refuse_own_code(parts.replaced())
    patch = Patch(base, attn_backend, unpad, report_of(spec, base, parts, choices))
    gate_and_up_plan = GateAndUpPlan(parts.gate_features(decoder.config))
    _swap_inside_layers(patch, decoder, parts, spec, backend, gate_and_up_plan)
    _swap_decoder(patch, base, decoder, parts, spec, choices, gate_and_up_plan)
    if base is not decoder and base.get_output_embeddings() is not None:
        vision_spec = vision_spec_of(base.config.model_type)
        _swap_causal_lm(patch, base, decoder, spec, vision_spec)
        if vision_spec is not None:
            swap_tower(patch.swap, patch.report, base, vision_spec, backend)
            if vision_spec.both_ways:
                attentions = [module for _, module in mixers_by_layer(decoder, spec)]
                layers = zip(attentions, choices, strict=True)
                let_blocks_be_captured(patch.report, layers, spec, request, decoder.step_graphs)
        let_in(base, set_before)
    if unpad and isinstance(base, GenericForSequenceClassification):
        patch.swap(base, FastRowAnswers)
    if model is not base:
        patch.swap(model, ListedModules, module_walk=ModuleWalk())
    decoder.config._attn_implementation = "sdpa"  # ordinary batches get masks of this form
    base.__dict__[PATCH] = patch
    prepare_trainers()
    return patch


def _swap_inside_layers(
    patch: Patch,
    decoder: Any,
    parts: DecoderParts,
    spec: ArchSpec,
    backend: str,
    gate_and_up_plan: GateAndUpPlan,
) -> None:
    if trains_tokens(embeddings := decoder.get_input_embeddings()):
        patch.swap(embeddings, FastTrainedTokens, ("places", "placed"))
    for mixer, module, choice in parts.mixers:
        patch.swap(module, mixer.forward, **mixer.attributes(spec, backend, choice))
    for norm in parts.norms:
        patch.swap(
            norm, NORMS[spec.norm], norm_offset=spec.norm_offset, norm_keeps_dtype=spec.norm_keeps_dtype
        )
    for layer in decoder.layers:
        if is_plain(layer):
            patch.swap(layer, FastLayer)
    for number, mlp, projections in parts.mlps:
        if projections is not None:
            patch.swap(
                mlp,
                FastMLP,
                spec=spec,
                projections=projections,
                decoder_layer=decoder.layers[number],
                number=number,
                gate_and_up_plan=gate_and_up_plan,
            )
    for activation in parts.activations:
        patch.swap(activation, FAST_ACTIVATIONS[type(activation)])
    for number, experts, gate in parts.experts:
        if gate is not None:
            patch.swap(
                experts,
                FastExperts,
                gate=gate,
                gate_module=getattr(experts, "act_fn", None),
                decoder_layer=decoder.layers[number],
                number=number,
                gate_and_up_plan=gate_and_up_plan,
            )
    for lora in parts.loras:
        patch.swap(lora, FastLoraLinear)
    for lora in parts.expert_loras:
        patch.swap(lora, FastExpertsLora)


def _swap_decoder(
    patch: Patch,
    base: Any,
    decoder: Any,
    parts: DecoderParts,
    spec: ArchSpec,
    choices: Sequence[Choice],
    gate_and_up_plan: GateAndUpPlan,
) -> None:
    tables = rotary_tables(decoder, spec)
    why_never = _why_never_captured(decoder, parts, tables, choices)
    graphs = StepGraphs(why_never, all(choice.room_is_free for choice in choices))
    patch.swap(
        decoder,
        FastDecoder,
        spec=spec,
        rotary_tables=tables,
        step_graphs=graphs,
        gate_and_up_plan=gate_and_up_plan,
        unpadding=patch.unpadding,
        leak_probe=OwnProbe(patch.report.attn_backend),
        rehearsal=Rehearsal(),
        trained_weights_sought=False,
        numbers_sought=False,
        answers_by_row=type(base).__name__ if isinstance(base, _ANSWER_BY_ROW) else None,
    )
    say_step(patch.report, graphs)


def _swap_causal_lm(
    patch: Patch, base: Any, decoder: Any, spec: ArchSpec, vision_spec: VisionSpec | None
) -> None:
    of_vision = {} if vision_spec is None else {"vision_spec": vision_spec, "accepts_loss_kwargs": True}
    patch.swap(
        base,
        FastCausalLM if vision_spec is None else FastVisionLM,
        DOOR_ATTRIBUTES,
        **of_vision,
        spec=spec,
        fast_decoder=decoder,
        is_wrapper=base.base_model is not decoder,
        training_loss=cross_entropy,
        boundary_labels_sought=False,
        module_walk=ModuleWalk(),
    )


def patch_of(model: nn.Module) -> Patch | None:
    """The patch in force on a model, or None."""
    return _transformers_model(model).__dict__.get(PATCH)


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    base: Any = model
    if hasattr(base, "peft_config") and hasattr(base, "get_base_model"):
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise InputError(
            f"cannot patch a {type(model).__name__}; give a transformers model, or a PEFT model of one"
        )
    return base


def _warn_of_slow_layers(spec: ArchSpec, choices: Sequence[Choice]) -> None:
    for remedy in dict.fromkeys(choice.remedy for choice in choices if choice.remedy):
        logger.warning("%s: %s", spec.model_type, remedy)


def _refuse_shared_parts(base: nn.Module, earlier: Patch | None) -> None:
    """Refuse a second patch on a module: once one is undone, the module ignores the rows of the other."""
    own = {} if earlier is None else earlier.kinds
    for name, module in base.named_modules():
        if is_made(type(module)) and type(module) not in own:
            raise InputError(
                f"{name or type(base).__name__} is patched already, in another model that shares it; undo "
                "that patch first, or load the model anew"
            )


def _why_never_captured(
    decoder: Any,
    parts: DecoderParts,
    tables: dict[str | None, RotaryTables],
    choices: Sequence[Choice],
) -> str | None:
    """Why no step of the model can be replayed from CUDA graphs, or None."""
    if decoder.get_input_embeddings().weight.device.type != "cuda":
        return "CUDA graphs need CUDA"
    if why := next((choice.why_not_captured for choice in choices if choice.why_not_captured), None):
        return why
    if why := parts.why_experts_not_captured():
        return why
    if parts.other_loras:
        return f"the adapter is on a {type(parts.other_loras[0].get_base_layer()).__name__}"
    if not all(table.is_static for table in tables.values()):
        return "the rotary embedding depends on the length of a document"
    return None
