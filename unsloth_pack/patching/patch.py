"""Patch a transformers model in place: on the instance, with a report, undone exactly.

A patched module keeps its parameters, attributes, hooks and name. Only its `__class__` changes, to a subclass
whose forward precedes transformers' own. So gradient checkpointing, `state_dict` keys, recorded hidden states
and deep copies work as before, with and without PEFT.

Outside the model, patching changes trainers and PEFT until the last `undo()`: see `METHODS` and `CALLBACKS`
in `trainer_hooks.py`.
"""

import copy
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import finalize

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from unsloth_pack.attention.backends import requested_backend
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.errors import InputError
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.layers.forward_call import (
    SLOT_ATTRIBUTES,
    adopt_forwards,
    drop_wrapped_forward,
    read_forwards,
)
from unsloth_pack.layers.layer import (
    FAST_ACTIVATIONS,
    NORMS,
    FastLayer,
    FastMLP,
    GateAndUpPlan,
    is_plain,
)
from unsloth_pack.layers.leak_probe import DecoderProbe
from unsloth_pack.layers.mixers import Choice, Request
from unsloth_pack.layers.moe import FastExperts, FastExpertsLora
from unsloth_pack.layers.rotary import RotaryTables, rotary_module, rotary_tables
from unsloth_pack.layers.sequence_classification import FastSequenceClassification
from unsloth_pack.layers.unpadding import Unpadding
from unsloth_pack.layers.vision.vision_lm import FastVisionLM
from unsloth_pack.lora.linear import FastLoraLinear
from unsloth_pack.lora.trained_tokens import FastTrainedTokens, trains_tokens
from unsloth_pack.losses.head import cross_entropy
from unsloth_pack.models import arch_spec_for, vision_spec_for
from unsloth_pack.models.spec import ArchSpec, VisionSpec
from unsloth_pack.modules import QuickWalks, base_of
from unsloth_pack.patching.parts import (
    DecoderParts,
    mixers_by_layer,
    refuse_leaks,
    refuse_own_code,
    refuse_unknown_parts,
)
from unsloth_pack.patching.report import PatchReport, build_report, report_changes, report_step
from unsloth_pack.patching.towers import prepare_blocks, swap_tower
from unsloth_pack.patching.trainer_hooks import HOOKS

logger = logging.getLogger("unsloth_pack")
PATCH = "unsloth_pack_patch"  # where a patched model holds its Patch
_SCORE_PADDING = (GenericForQuestionAnswering, GenericForTokenClassification)


@cache
def subclass(fast: type, original: type) -> type:
    """Subclass `original` with the forward of `fast`, under the original's name, which is saved.

    Calling the class builds a plain `original`: the forward needs attributes that only a patch sets.
    """

    def new(kind: type, *args: object, **kwargs: object) -> object:
        if not args and not kwargs:  # torch's replicas pass no arguments
            return object.__new__(kind)
        return original(*map(_restore_config, args), **kwargs)

    names: dict[str, object] = {
        name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    return type(original.__name__, (fast, original), {**names, "__new__": new, "__reduce_ex__": _reduce})


def _restore_config(argument: Any) -> object:
    """Undo a patched model's "sdpa" in its configuration, which its own class may not take."""
    if getattr(argument, "_attn_implementation", None) == "sdpa":
        argument = copy.deepcopy(argument)
        argument._attn_implementation = None
    return argument


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle by the class's bases: it cannot be imported by its name."""
    return _new, type(module).__bases__, *object.__reduce_ex__(module, protocol)[2:]


def _new(fast: type, original: type) -> object:
    return object.__new__(subclass(fast, original))


class Patch:
    """A patch on a model. `undo()` takes it off; as a context manager, leaving the context does."""

    def __init__(
        self,
        model: PreTrainedModel,
        attn_backend: str,
        unpad: bool,
        share_prefixes: bool,
        why_no_branches: str | None,
        report: PatchReport,
    ):
        self.attn_backend = attn_backend
        self.unpad, self.share_prefixes = unpad, share_prefixes
        self.why_no_branches = why_no_branches
        why_never = None if unpad else "unpad=False"
        if unpad and isinstance(model, _SCORE_PADDING):
            why_never = f"a {type(model).__name__} scores every place of a row, padding too"
        why_no_sharing = why_no_branches if share_prefixes else "share_prefixes=False"
        self.unpadding = Unpadding(
            why_never, isinstance(model, GenericForSequenceClassification), why_no_sharing
        )
        self._report = report
        self._model = model
        self._decoder = model.get_decoder()
        self._swapped: list[tuple[nn.Module, type, tuple[str, ...]]] = []
        self._attn_implementation = self._decoder.config._attn_implementation

    @property
    def report(self) -> PatchReport:
        """Return what is fused now: adapters may have come or gone since the patch."""
        if self._swapped:
            report_changes(self._report, self._model, self.unpadding)
        return self._report

    def swap(self, module: nn.Module, fast: type, later: Sequence[str] = (), **attributes: object) -> None:
        """Make `module` an instance of `fast` until the patch goes, with attributes and `later` ones."""
        if isinstance(module, fast):  # layers may share it
            return
        self._swapped.append((module, type(module), (*attributes, *later)))
        original: Any = type(module)
        module.__class__ = subclass(fast, original)
        module.__dict__.update(attributes)

    def skip_probe(self) -> None:
        """Skip the leak probe before the first packed row in training."""
        self._decoder.leak_probe = None

    @property
    def kinds(self) -> dict[type, tuple[type, tuple[str, ...]]]:
        """Return each class of this patch with the one it replaced and its instances' attributes."""
        return {type(module): (original, attributes) for module, original, attributes in self._swapped}

    def undo(self) -> None:
        """Restore the original model, bit for bit.

        Copies that PEFT has made for `modules_to_save` are restored too, and forwards that trainers have set
        on the model are removed. The last patch to go takes back what patches changed outside their
        models; a deleted model counts as undone. Undoing twice is harmless.
        """
        kinds = self.kinds
        for module in [*(module for module, *_ in self._swapped), *self._model.modules()]:
            if type(module) in kinds:
                module.__class__, attributes = kinds[type(module)]
                for name in attributes:
                    module.__dict__.pop(name, None)
        self._swapped.clear()
        self._uninstall_hooks()
        drop_wrapped_forward(self._model, FastCausalLM.forward)
        if self._model.__dict__.get(PATCH) is self:
            del self._model.__dict__[PATCH]
            self._decoder.config._attn_implementation = self._attn_implementation

    def install_hooks(self) -> None:
        """Keep the trainer hooks installed until `undo()`, or until the model is deleted."""
        HOOKS.install()
        self._uninstall_hooks = finalize(self, HOOKS.uninstall)
        self._uninstall_hooks.atexit = False

    def __setstate__(self, state: dict[str, object]) -> None:
        """A copy of a patched model is patched, too."""
        self.__dict__.update(state)
        self.install_hooks()

    def capture_nothing(self, why: str) -> None:
        """Capture no steps from now on, and report why."""
        self._decoder.step_graphs = StepGraphs(why)
        report_step(self.report, self._decoder.step_graphs)

    def adapt_to_sharding(self, how: str) -> None:
        """Adapt to parameters that `how` sharded after patching, and report it."""
        self.capture_nothing(f"{how} shards the parameters")
        for mixer, module in mixers_by_layer(self._decoder, self._decoder.spec):
            _, not_fused = mixer.what_is_fused(module, self._decoder.spec, "")
            for kind in not_fused.keys() & self._report.fused.keys():
                self._report.record(kind, None, f"{how} gathers it by itself")

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_model(
    model: nn.Module, attn_backend: str = "auto", unpad: bool = True, share_prefixes: bool = True
) -> Patch:
    """Patch a transformers model: it takes packed rows, and its layers run fused where they can.

    Args:
        model: a supported transformers model, or a PEFT model around one, before or after training.
        attn_backend: "auto" (the fastest that can run), "flash", "xformers", "triton" or "sdpa"; the
            environment variable `UNSLOTH_PACK_ATTN` overrides it.
        unpad: run a padded batch as a packed row, without its padding, in training and wherever no cache is
            built.
        share_prefixes: compute the tokens once with which several rows of such a batch begin, as answers to
            one prompt do, where that saves a sixteenth of its tokens or more.

    Returns:
        The patch, with its `report` and `undo()`. A patched model is patched anew.

    Raises:
        UnsupportedArchitecture: no patch is declared for the model type.
        BackendUnavailable: the requested backend cannot run here.
        InputError: the documents of a packed row could not be kept apart in this model; another patch is in
            force on a part of it, which two models share.
    """
    for name, value in (("unpad", unpad), ("share_prefixes", share_prefixes)):
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}; give True or False")
    base = _unwrap_peft(model)
    decoder = base.get_decoder()
    spec = arch_spec_for(decoder.config.model_type)
    earlier = base.__dict__.get(PATCH)
    refuse_leaks(model, decoder)
    _refuse_shared_parts(base, earlier)
    mixers = mixers_by_layer(decoder, spec)
    for mixer, module in mixers:
        refuse_unknown_parts(mixer, module, spec)
    backend, source = requested_backend(attn_backend)
    embedding = decoder.get_input_embeddings().weight
    request = Request(embedding.device.type, embedding.dtype, backend, source, decoder.config)
    choices = [mixer.choose(module, spec, request) for mixer, module in mixers]
    refuse_own_code([base, decoder, *filter(None, [rotary_module(decoder, spec)])])
    earlier_forwards = read_forwards(base)
    if earlier is not None:  # only now: a refusal above leaves the earlier patch in place
        earlier.undo()
    for remedy in dict.fromkeys(choice.remedy for choice in choices if choice.remedy):
        logger.warning("%s: %s", spec.model_type, remedy)
    parts = DecoderParts.from_decoder(decoder, spec, choices)
    refuse_own_code([*parts.norms, *(mlp for _, mlp, named in parts.mlps if named is not None)])
    refuse_own_code(experts for _, experts, gate in parts.experts if gate is not None)
    tables = rotary_tables(decoder, spec)
    why_no_branches = _why_no_branches(parts, tables)
    report = build_report(spec, base, parts, choices)
    patch = Patch(base, attn_backend, unpad, share_prefixes, why_no_branches, report)
    _swap_decoder(patch, base, decoder, parts, spec, choices, backend, tables)
    if base is not decoder and base.get_output_embeddings() is not None:
        vision_spec = vision_spec_for(base.config.model_type)
        _swap_causal_lm(patch, base, decoder, spec, vision_spec)
        if vision_spec is not None:
            swap_tower(patch.swap, patch.report, base, vision_spec, backend)
            if vision_spec.both_ways:
                layers = zip([module for _, module in mixers], choices, strict=True)
                prepare_blocks(patch.report, layers, spec, request, decoder.step_graphs)
        adopt_forwards(base, earlier_forwards)
    if isinstance(base, GenericForSequenceClassification):
        patch.swap(base, FastSequenceClassification)
    if model is not base:
        patch.swap(model, QuickWalks)
    decoder.config._attn_implementation = "sdpa"  # ordinary batches get masks of this form
    base.__dict__[PATCH] = patch
    patch.install_hooks()
    return patch


def _swap_decoder(
    patch: Patch,
    base: object,
    decoder: Any,
    parts: DecoderParts,
    spec: ArchSpec,
    choices: Sequence[Choice],
    backend: str,
    tables: dict[str | None, RotaryTables],
) -> None:
    plan = GateAndUpPlan(parts.count_gate_features(decoder.config))

    def place_of(number: int) -> dict[str, Any]:
        return {"decoder_layer": decoder.layers[number], "number": number, "gate_and_up_plan": plan}

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
            patch.swap(mlp, FastMLP, spec=spec, projections=projections, **place_of(number))
    for activation in parts.activations:
        patch.swap(activation, FAST_ACTIVATIONS[type(activation)])
    for number, experts, gate in parts.experts:
        if gate is not None:
            act = getattr(experts, "act_fn", None)
            patch.swap(experts, FastExperts, gate=gate, gate_module=act, **place_of(number))
    for lora in parts.loras:
        patch.swap(lora, FastLoraLinear)
    for lora in parts.expert_loras:
        patch.swap(lora, FastExpertsLora)
    why_never = _why_never_captured(decoder, parts, tables, choices)
    graphs = StepGraphs(why_never, all(choice.room_is_free for choice in choices))
    patch.swap(
        decoder,
        FastDecoder,
        spec=spec,
        norm_name=spec.name("norm"),
        row_keywords=frozenset({"packed_row", spec.name("packed_row")}),
        rotary_tables=tables,
        step_graphs=graphs,
        gate_and_up_plan=plan,
        unpadding=patch.unpadding,
        why_no_branches=patch.why_no_branches,
        leak_probe=DecoderProbe(patch.report.attn_backend),
        kernels_are_compiled=False,
        has_checked_trained_weights=False,
        has_checked_mask=False,
        answers_by_row=type(base).__name__ if isinstance(base, GenericForQuestionAnswering) else None,
    )
    report_step(patch.report, graphs)


def _swap_causal_lm(
    patch: Patch, base: Any, decoder: Any, spec: ArchSpec, vision_spec: VisionSpec | None
) -> None:
    vision = {} if vision_spec is None else {"vision_spec": vision_spec, "accepts_loss_kwargs": True}
    is_wrapper, config = base.base_model is not decoder, base.config.get_text_config()
    divisor, softcap = spec.read_logit_divisor(config), spec.read_logit_softcap(config)
    if is_wrapper:  # of which transformers divides no logits, and caps them in some
        divisor, softcap = 1.0, softcap if spec.wrapper_has_softcap else None
    patch.swap(
        base,
        FastCausalLM if vision_spec is None else FastVisionLM,
        SLOT_ATTRIBUTES,
        **vision,
        spec=spec,
        fast_decoder=decoder,
        is_wrapper=is_wrapper,
        logit_divisor=divisor,
        logit_softcap=softcap,
        training_loss=cross_entropy,
        has_checked_boundary_labels=False,
        n_weights=None,
    )


def patch_of(model: nn.Module) -> Patch | None:
    """Return the patch in force on a model, or None."""
    return _unwrap_peft(model).__dict__.get(PATCH)


def _unwrap_peft(model: nn.Module) -> PreTrainedModel:
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise InputError(
            f"cannot patch a {type(model).__name__}; give a transformers model, or a PEFT model of one"
        )
    return base


def _refuse_shared_parts(base: nn.Module, earlier: Patch | None) -> None:
    """Refuse a second patch on a module: undoing one would break the rows of the other."""
    own = {} if earlier is None else earlier.kinds
    for name, module in base.named_modules():
        if vars(type(module)).get("__reduce_ex__") is _reduce and type(module) not in own:
            raise InputError(
                f"{name or type(base).__name__} is patched already, in another model; undo that patch first"
            )


def _why_no_branches(parts: DecoderParts, tables: dict[str | None, RotaryTables]) -> str | None:
    """Return why no segment of a row may continue another in this model, or None."""
    if not all(mixer.takes_branches for mixer, *_ in parts.mixers):
        return "a layer carries a state from token to token"
    if not all(table.is_static for table in tables.values()):
        return "the rotary embedding depends on the length of a document"
    return None


def _why_never_captured(
    decoder: Any, parts: DecoderParts, tables: dict[str | None, RotaryTables], choices: Sequence[Choice]
) -> str | None:
    """Return why no step of the model can be replayed from CUDA graphs, or None."""
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
