"""Patching a transformers model in place: on the instance, reported, undone exactly.

Outside of it only trainers learn to give spare GPU memory back when they are done, see `spare_memory`.

A patched module keeps its parameters, attributes, hooks and name; only its `__class__` becomes a subclass
that puts a shared forward before transformers' own. So gradient checkpointing, `state_dict` keys, recording
of hidden states and deep copies go on as they were, before and after PEFT.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForQuestionAnswering, GenericForSequenceClassification

from unsloth_pack.attention import BACKENDS, choose_backend
from unsloth_pack.attention.backends import requested_backend
from unsloth_pack.attention.options import AttentionNeed
from unsloth_pack.errors import InputError
from unsloth_pack.graph import StepGraphs
from unsloth_pack.leak_probe import OwnProbe
from unsloth_pack.models import spec_of
from unsloth_pack.models.fast_attention import FastAttention, attention_options, fusable_qk_norm
from unsloth_pack.models.fast_decoder import FastCausalLM, FastDecoder
from unsloth_pack.models.fast_lora import LORA_TYPES, FastLoraLinear, why_not_fused
from unsloth_pack.models.fast_loss import why_loss_not_fused
from unsloth_pack.models.fast_mlp import FastMLP, activation_of
from unsloth_pack.models.fast_norm import FastRMSNorm
from unsloth_pack.models.fp8 import Fp8Linear
from unsloth_pack.models.module_walk import ListedModules, ModuleWalk
from unsloth_pack.models.nf4 import is_linear_4bit
from unsloth_pack.models.rotary import RotaryTables, rotary_tables
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.spare_memory import give_back_spare_memory

_PATCH = "unsloth_pack_patch"  # where a patched model holds its Patch
_ANSWER_BY_ROW = (GenericForQuestionAnswering, GenericForSequenceClassification)


@dataclass(frozen=True)
class PatchReport:
    """What was patched, what was not and why. `print(report)` shows it as lines.

    Args:
        model_type: the architecture.
        n_layers: decoder layers.
        attn_backend: the attention backend, "a and b" where layers differ.
        attn_reason: why that backend.
        fused: layer kind -> what runs fused.
        not_fused: layer kind -> what runs as transformers wrote it, and why.
    """

    model_type: str
    n_layers: int
    attn_backend: str
    attn_reason: str
    fused: dict[str, str] = field(default_factory=dict)
    not_fused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.model_type}: {self.n_layers} layers patched",
            f"  attention backend: {self.attn_backend} ({self.attn_reason})",
        ]
        lines += [f"  fused      {kind}: {what}" for kind, what in self.fused.items()]
        lines += [f"  not fused  {kind}: {why}" for kind, why in self.not_fused.items()]
        return "\n".join(lines)


class Patch:
    """A patch in force. `undo()` takes it off; as a context manager it does so on leaving.

    Args:
        model: the transformers model it is on.
        attn_backend: the backend that was asked for, "auto" included.
        report: what it did, on patching.
    """

    def __init__(self, model: PreTrainedModel, attn_backend: str, report: PatchReport):
        self.attn_backend = attn_backend
        self._report = report
        self._model = model
        self._swapped: list[tuple[nn.Module, type, tuple[str, ...]]] = []
        self._attn_implementation = model.config._attn_implementation

    @property
    def report(self) -> PatchReport:
        """What is fused in the model as it is now: adapters may have come or gone since the patch."""
        if self._swapped:
            loras = [module for module in self._model.base_model.modules() if isinstance(module, LoraLayer)]
            _report_loras(
                self._report,
                [lora for lora in loras if isinstance(lora, FastLoraLinear)],
                [lora for lora in loras if not isinstance(lora, FastLoraLinear)],
            )
            _report_loss(self._report, self._model)
        return self._report

    def swap(self, module: nn.Module, fast: type, **attributes: Any) -> None:
        """Make `module` an instance of `fast` over its own class, with these instance attributes."""
        if isinstance(module, fast):  # layers may share it
            return
        self._swapped.append((module, type(module), tuple(attributes)))
        module.__class__ = _subclass(fast, type(module))
        module.__dict__.update(attributes)

    def skip_probe(self) -> None:
        """Let the model not look for leaks before its first packed row in training."""
        self._model.base_model.leak_probe = None

    def undo(self) -> None:
        """Restore the model that came in, bit for bit, and what PEFT has copied of it since for
        `modules_to_save`. Undoing twice is harmless."""
        kinds = {type(module): (original, attributes) for module, original, attributes in self._swapped}
        for module in [*(module for module, *_ in self._swapped), *self._model.modules()]:
            if type(module) not in kinds:
                continue
            module.__class__, attributes = kinds[type(module)]
            for name in attributes:
                module.__dict__.pop(name, None)
        self._swapped.clear()
        if self._model.__dict__.get(_PATCH) is self:
            del self._model.__dict__[_PATCH]
            self._model.config._attn_implementation = self._attn_implementation

    def adapt_to_sharding(self, how: str) -> None:
        """Run as parameters need it that were sharded after patching, and report that.

        Args:
            how: what shards them, for the report.
        """
        decoder = self._model.base_model
        decoder.step_graphs = StepGraphs(f"{how} shards the parameters")
        _report_step(self.report, decoder.step_graphs)
        if (
            "QK norm" in self._report.fused
            and fusable_qk_norm(decoder.layers[0].self_attn, decoder.spec) is None
        ):
            _say(self._report, "QK norm", None, f"{how} gathers it by itself")

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


@cache
def _subclass(fast: type, original: type) -> type:
    """`original` with the forward of `fast`, under the original's name: `save_pretrained` writes it."""
    names: dict[str, Any] = {
        name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    return type(original.__name__, (fast, original), {**names, "__reduce_ex__": _reduce})


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickles: the class is not to be found under its name."""
    return _new, type(module).__bases__, *object.__reduce_ex__(module, protocol)[2:]


def _new(fast: type, original: type) -> Any:
    made: Any = _subclass(fast, original)
    return made.__new__(made)


def patch_model(model: nn.Module, attn_backend: str = "auto") -> Patch:
    """Thread packed rows through a transformers model and fuse what can be fused.

    Args:
        model: a supported transformers model, or a PEFT model around one, before or after training.
        attn_backend: "auto" (the fastest that can run), "flash", "xformers" or "sdpa"; the environment
            variable `UNSLOTH_PACK_ATTN` overrides it.

    Returns:
        The patch, with its `report` and `undo()`. A model that is patched already is patched anew.

    Raises:
        UnsupportedArchitecture: no patch is declared for the model type.
        BackendUnavailable: the backend that was asked for cannot run here.
        InputError: the model is built in a way whose documents could not be kept apart.
    """
    base = _transformers_model(model)
    decoder = base.base_model
    spec = spec_of(decoder.config.model_type)
    _refuse_what_would_leak(model, decoder)
    backend, source = requested_backend(attn_backend)
    chosen = _choose_backends(spec, decoder, backend, source)
    if earlier := base.__dict__.get(_PATCH):  # only now: a refusal leaves the model as patched as it was
        earlier.undo()
    parts = _Parts.of(decoder)
    patch = Patch(base, attn_backend, _report(spec, base, parts, chosen))
    for attention in parts.attentions:
        patch.swap(attention, FastAttention, spec=spec, attn_backend=backend)
    for norm in parts.norms:
        patch.swap(norm, FastRMSNorm, norm_offset=spec.norm_offset)
    for number, (mlp, activation) in enumerate(parts.mlps):
        if activation is not None:
            layer = decoder.layers[number]
            patch.swap(mlp, FastMLP, decoder_layer=layer, number=number)
    for lora in parts.loras:
        patch.swap(lora, FastLoraLinear)
    tables = rotary_tables(decoder, spec)
    graphs = StepGraphs(_why_never_captured(decoder, parts, tables, chosen))
    _report_step(patch.report, graphs)
    own_probe = OwnProbe(patch.report.attn_backend)
    patch.swap(
        decoder,
        FastDecoder,
        spec=spec,
        rotary_tables=tables,
        step_graphs=graphs,
        leak_probe=own_probe,
        trained_weights_sought=False,
        numbers_sought=False,
        answers_by_row=type(base).__name__ if isinstance(base, _ANSWER_BY_ROW) else None,
    )
    if base is not decoder and base.get_output_embeddings() is not None:
        patch.swap(base, FastCausalLM, spec=spec, module_walk=ModuleWalk())
    if model is not base:
        patch.swap(model, ListedModules, module_walk=ModuleWalk())
    base.config._attn_implementation = "sdpa"  # ordinary batches get masks of this form
    base.__dict__[_PATCH] = patch
    give_back_spare_memory()
    return patch


def patch_of(model: nn.Module) -> Patch | None:
    """The patch in force on a model, or None."""
    return _transformers_model(model).__dict__.get(_PATCH)


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    base = (
        model.get_base_model()
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        else model
    )
    if not isinstance(base, PreTrainedModel):
        raise InputError(
            f"cannot patch a {type(model).__name__}; give a transformers model, or a PEFT model of one"
        )
    return base


def _refuse_what_would_leak(model: Any, decoder: Any) -> None:
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise InputError(
                f"adapter {name!r} is {config.peft_type}: its virtual tokens shift the documents; use LoRA"
            )
        if getattr(config, "is_adaption_prompt", False):
            raise InputError(f"adapter {name!r} is {config.peft_type}: it wraps the attention; use LoRA")
        if getattr(config, "alora_invocation_tokens", None):
            raise InputError(
                f"adapter {name!r} has alora_invocation_tokens: PEFT looks for them once a row, not in each "
                "document; leave them out"
            )
    if getattr(decoder.config, "use_bidirectional_attention", False):
        raise InputError(
            "use_bidirectional_attention=True: only causal attention is patched; set it to False"
        )
    if not getattr(decoder.config, "is_causal", True):
        raise InputError("is_causal=False: only causal attention is patched; set it to True")
    devices = {str(parameter.device) for parameter in decoder.parameters()}
    if len(devices) > 1:
        raise InputError(f"the model lies on {', '.join(sorted(devices))}; load it on one device")


@dataclass(frozen=True)
class _Parts:
    """The modules of a decoder that a patch looks at."""

    attentions: list[Any]
    norms: list[nn.Module]
    mlps: list[tuple[nn.Module, str | None]]  # with the kernel's activation, None where it cannot be fused
    loras: list[LoraLayer]
    other_loras: list[LoraLayer]  # in 8 bits, or on parameters such as stacked experts

    @classmethod
    def of(cls, decoder: Any) -> "_Parts":
        return cls(
            attentions=_alike(decoder, decoder.layers[0].self_attn),
            norms=_alike(decoder, decoder.norm),
            mlps=[(layer.mlp, activation_of(layer.mlp)) for layer in decoder.layers],
            loras=[module for module in decoder.modules() if type(module) in LORA_TYPES],
            other_loras=[
                module
                for module in decoder.modules()
                if isinstance(module, LoraLayer) and type(module) not in LORA_TYPES
            ],
        )


def _alike(decoder: nn.Module, one: nn.Module) -> list[Any]:
    """All modules of the kind of this one, which `modules_to_save` may wrap with a copy."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in decoder.modules() if type(module) is kind]


def _why_never_captured(
    decoder: Any, parts: _Parts, tables: dict[str | None, RotaryTables], backends: Iterable[str]
) -> str | None:
    """Why no step of the model can be replayed from CUDA graphs, or None."""
    if decoder.get_input_embeddings().weight.device.type != "cuda":
        return "CUDA graphs need CUDA"
    if on_host := [name for name in backends if not BACKENDS[name].can_be_captured]:
        return f"{on_host[0]} reads the row on the host"
    if any(activation is None for _, activation in parts.mlps):
        return "routed experts depend on the tokens"
    if parts.other_loras:
        return f"the adapter is on a {type(parts.other_loras[0].get_base_layer()).__name__}"
    if not all(table.is_static for table in tables.values()):
        return "the rotary embedding depends on the length of a document"
    return None


def _choose_backends(spec: ArchSpec, decoder: Any, backend: str, source: str) -> dict[str, str]:
    """The attention backends of the layers, each with why."""
    embedding = decoder.get_input_embeddings().weight
    chosen: dict[str, str] = {}
    for layer in decoder.layers:
        attention = layer.self_attn
        options = attention_options(attention, spec)
        need = AttentionNeed(embedding.device.type, embedding.dtype, attention.head_dim, options)
        name, reason = choose_backend(backend, need, source)
        chosen[name] = reason
    return chosen


def _report(spec: ArchSpec, base: Any, parts: _Parts, chosen: dict[str, str]) -> PatchReport:
    decoder = base.base_model
    on_gpu = decoder.get_input_embeddings().weight.device.type == "cuda"
    how = "in one kernel" if on_gpu else "in plain torch on a CPU"
    fused = {"attention": f"documents kept apart; rotary embedding of q and k {how}"}
    not_fused: dict[str, str] = {}
    if spec.qk_norm is not None:
        if fusable_qk_norm(parts.attentions[0], spec) is not None:
            fused["QK norm"] = "with the rotary embedding"
        else:
            not_fused["QK norm"] = "wrapped by modules_to_save, or with hooks"
    fused["norms"] = f"{len(parts.norms)} RMS norms, each {how}"
    gated_mlps = [mlp for mlp, activation in parts.mlps if activation is not None]
    if gated_mlps:
        fused["MLP"] = f"activation and product of {len(gated_mlps)} of {len(parts.mlps)} layers {how}"
    if len(gated_mlps) < len(parts.mlps):
        kinds = {type(mlp).__name__ for mlp, activation in parts.mlps if activation is None}
        not_fused["MLP"] = f"{', '.join(sorted(kinds))} of {len(parts.mlps) - len(gated_mlps)} layers"
    if n_fp8 := sum(isinstance(module, Fp8Linear) for module in decoder.modules()):
        fused["base"] = f"{n_fp8} frozen linear layers in fp8"
    if n_nf4 := sum(is_linear_4bit(lora.get_base_layer()) for lora in parts.loras):
        fused["base"] = f"{n_nf4} frozen linear layers in 4 bits, dequantised at each use"
    report = PatchReport(
        model_type=spec.model_type,
        n_layers=len(decoder.layers),
        attn_backend=" and ".join(chosen),
        attn_reason="; ".join(dict.fromkeys(chosen.values())),
        fused=fused,
        not_fused=not_fused,
    )
    _report_loss(report, base)
    _report_loras(report, parts.loras, parts.other_loras)
    return report


def _say(report: PatchReport, kind: str, fused: str | None, not_fused: str | None) -> None:
    """Report this of a layer kind, in place of what was reported."""
    for said, what in ((report.fused, fused), (report.not_fused, not_fused)):
        if what:
            said[kind] = what
        else:
            said.pop(kind, None)


def _report_loss(report: PatchReport, model: Any) -> None:
    if (why := why_loss_not_fused(model)) is None:
        how = "with the head, for tokens that have a label; TRL's trainer computes its own"
        _say(report, "loss", how, None)
    else:
        _say(report, "loss", None, f"from the logits of all tokens: {why}")


def _report_loras(report: PatchReport, loras: list[Any], other_loras: list[LoraLayer]) -> None:
    reasons = Counter(why_not_fused(lora) for lora in loras)
    reasons.update(
        "put on after the patch; call patch_model again"
        if type(lora) in LORA_TYPES
        else f"on a {type(lora.get_base_layer()).__name__}"
        for lora in other_loras
    )
    n_fused = reasons.pop(None, 0)
    how = f"{n_fused} layers; those over one input, and those of an MLP, as one autograd node"
    why = ", ".join(f"{n} layers: {reason}" for reason, n in reasons.items())
    _say(report, "LoRA", how if n_fused else None, why)


def _report_step(report: PatchReport, graphs: StepGraphs) -> None:
    if graphs.why_not is None:
        how = "captured in CUDA graphs while it waits for Python, see `StepGraphs`"
        _say(report, "step", how, None)
    else:
        _say(report, "step", None, f"not captured in CUDA graphs: {graphs.why_not}")
