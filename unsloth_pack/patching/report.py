"""Report what a patch fuses, what it does not, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.cuda_graphs.tower import TowerGraphs
from unsloth_pack.layers.forward_call import read_trl_head
from unsloth_pack.layers.layer import is_plain
from unsloth_pack.layers.mixers import Choice
from unsloth_pack.layers.moe import (
    FastExperts,
    FastExpertsLora,
    read_gate,
    why_experts_not_fused,
    why_reads_host,
)
from unsloth_pack.layers.rotary import rotary_module
from unsloth_pack.layers.unpadding import Unpadding
from unsloth_pack.lora.expert_stacks import (
    STACKS,
    QuantisedStack,
    get_stored_stack,
    is_expert_adapter,
    is_experts,
    why_adapter_not_fused,
)
from unsloth_pack.lora.linear import FastLoraLinear, is_lora_linear, why_not_fused
from unsloth_pack.lora.quantised import Fp8Linear, is_linear_4bit
from unsloth_pack.lora.trained_tokens import trains_tokens
from unsloth_pack.losses.head import why_head_not_fused, why_loss_not_fused
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.patching.parts import DecoderParts


@dataclass(frozen=True)
class PatchReport:
    """Lists what was patched, what was not, and why. `print(report)` shows it as lines."""

    model_type: str  # the architecture
    n_layers: int  # decoder layers
    attn_backend: str  # the attention backend, "a and b" where layers differ
    attn_reason: str  # why that backend
    fused: dict[str, str] = field(default_factory=dict)  # layer kind -> what runs fused
    # layer kind -> what runs as transformers wrote it, and why
    not_fused: dict[str, str] = field(default_factory=dict)

    def record(self, kind: str, fused: str | None, not_fused: str | None = None) -> None:
        """Replace the report on a kind of layer."""
        for entries, text in ((self.fused, fused), (self.not_fused, not_fused)):
            if text:
                entries[kind] = text
            else:
                entries.pop(kind, None)

    def __str__(self) -> str:
        lines = [
            f"{self.model_type}: {self.n_layers} layers patched",
            f"  attention backend: {self.attn_backend} ({self.attn_reason})",
        ]
        lines += [f"  fused      {kind}: {what}" for kind, what in self.fused.items()]
        lines += [f"  not fused  {kind}: {why}" for kind, why in self.not_fused.items()]
        return "\n".join(lines)


def build_report(
    spec: ArchSpec, base: PreTrainedModel, parts: DecoderParts, choices: Sequence[Choice]
) -> PatchReport:
    """Report what patching these parts does, except for what may change later: see `report_changes`."""
    decoder = base.get_decoder()
    report = PatchReport(
        model_type=spec.model_type,
        n_layers=len(decoder.layers),
        attn_backend=" and ".join(dict.fromkeys(choice.name for choice in choices)),
        attn_reason="; ".join(dict.fromkeys(choice.reason for choice in choices)),
    )
    fused = report.fused
    on_gpu = decoder.get_input_embeddings().weight.device.type == "cuda"
    how = "in one kernel" if on_gpu else "in plain torch on a CPU"
    if trains_tokens(decoder.get_input_embeddings()):
        fused["trained tokens"] = "looked up in a matrix of their own"
    for mixer, module, _ in parts.mixers:
        of_mixer, not_of_mixer = mixer.what_is_fused(module, spec, how)
        fused.update(of_mixer)
        report.not_fused.update(not_of_mixer)
    if rotary_module(decoder, spec) is None:
        for kind in ("rotary embedding", "QK norm"):
            fused.pop(kind, None)
    fused["norms"] = f"{len(parts.norms)} {'RMS' if spec.norm == 'rms' else 'layer'} norms, each {how}"
    if n_plain := sum(map(is_plain, decoder.layers)):
        fused["norms"] += f", with the sums of residuals in {n_plain} of {len(decoder.layers)} layers"
    others = [mlp for _, mlp, projections in parts.mlps if projections is None]
    if n_gated := len(parts.mlps) - len(others):
        fused["MLP"] = f"activation and product of {n_gated} of {len(parts.mlps)} layers {how}"
    if others:
        report.not_fused["MLP"] = f"{_names(others)} of {len(others)} layers"
    if parts.activations:
        fused["activation"] = f"{len(parts.activations)} of {_names(parts.activations)}, each {how}"
    if n_fp8 := sum(isinstance(module, Fp8Linear) for module in decoder.modules()):
        fused["base"] = f"{n_fp8} frozen linear layers in fp8"
    if n_nf4 := sum(is_linear_4bit(lora.get_base_layer()) for lora in parts.loras):
        fused["base"] = f"{n_nf4} frozen linear layers in 4 bits, dequantised at each use"
    return report


def _names(modules: Sequence[object]) -> str:
    return ", ".join(sorted({type(module).__name__ for module in modules}))


def report_changes(report: PatchReport, model: PreTrainedModel, unpadding: Unpadding) -> None:
    """Report what adapters, trainers and batches have changed by now."""
    # Where `modules_to_save` copied a module, the copy computes
    modules = [m for path, m in model.get_decoder().named_modules() if ".original_module" not in path]
    _report_experts(report, [module for module in modules if is_experts(module)])
    reasons = Counter(_why_lora_not_fused(module) for module in modules if isinstance(module, LoraLayer))
    how = "layers; those over one input, and those of an MLP, as one autograd node"
    _report_layers(report, "LoRA", reasons, how)
    if isinstance(model, GenericForSequenceClassification):
        report.record("answers", "one for each document, from the head at its last token alone")
    elif model is model.get_decoder():
        report.record("answers", "hidden states, of which `pool_documents` makes one embedding a document")
    else:
        why = why_loss_not_fused(model)
        fused = None if why else "with the head, for tokens that have a label"
        report.record("loss", fused, why and f"from the logits of all tokens: {why}")
    if (trl_head := read_trl_head(model)) is not None:
        why = trl_head.why_not or why_head_not_fused(model)
        fused = None if why else "from the same kernel"
        report.record("TRL's loss", fused, why and f"in TRL's chunks of logits: {why}")
    why = unpadding.why_never
    fused = None if why else "taken out of batches in training, and where no cache is made"
    padded = "; ".join(f"kept in {n} batches: {reason}" for reason, n in unpadding.kept.items())
    report.record("padding", fused, why or padded)
    why = why or unpadding.why_no_sharing
    fused = "computed once for rows of a batch that begin alike"
    if unpadding.tokens:
        fused += f", {unpadding.shared_tokens:,} of {unpadding.tokens:,} tokens saved so far"
    unshared = "; ".join(f"kept in {n} batches: {reason}" for reason, n in unpadding.unshared.items())
    report.record("prefixes", None if why else fused, why or unshared)


def _report_layers(report: PatchReport, kind: str, reasons: Counter[str | None], how: str) -> None:
    """Report how many layers of a kind are fused, and why others are not; `reasons` counts None for fused."""
    n_fused = reasons.pop(None, 0)
    not_fused = ", ".join(f"{n} layers: {reason}" for reason, n in reasons.items())
    report.record(kind, f"{n_fused} {how}" if n_fused else None, not_fused)


def _report_experts(report: PatchReport, experts: Sequence[Any]) -> None:
    reasons = Counter(
        why_experts_not_fused(one)
        if isinstance(one, FastExperts)
        else "no kernel computes what they do with gate and up"
        for one in experts
    )
    how = "layers, each as one autograd node"
    if None in reasons and (why := why_reads_host(experts[0])):
        how += f"; one expert after another: {why}"
    stack = get_stored_stack(experts[0], STACKS[0]) if experts else None
    if None in reasons and isinstance(stack, QuantisedStack):
        how += f"; their {stack.dequantizer.form} weights are dequantised at each use"
    _report_layers(report, "experts", reasons, how)


def _why_lora_not_fused(lora: Any) -> str | None:
    if isinstance(lora, FastLoraLinear):
        return why_not_fused(lora)
    if isinstance(lora, FastExpertsLora):
        experts = lora.get_base_layer()
        has_kernel = read_gate(experts) is not None and why_experts_not_fused(experts) is None
        return why_adapter_not_fused(lora) if has_kernel else "its experts are not fused"
    if is_lora_linear(lora) or is_expert_adapter(lora):
        return "added after the patch; call patch_model again"
    return f"on a {type(lora.get_base_layer()).__name__}"


def report_step(report: PatchReport, graphs: StepGraphs) -> None:
    """Report whether steps are captured."""
    why = graphs.why_not
    captured = None if why else "captured in CUDA graphs while it waits for Python, see `StepGraphs`"
    report.record("step", captured, why and f"not captured in CUDA graphs: {why}")


def report_tower(
    report: PatchReport, n_layers: int, backend: str | None, why: str, graphs: TowerGraphs | None = None
) -> None:
    """Report how a vision tower attends, by transformers' own attention for None, and if it is captured."""
    how = [f"all images of a row in one call a layer, {n_layers} layers, through {backend} ({why})"]
    not_fused = None
    if backend is None:
        how, not_fused = [], f"{n_layers} layers attend as transformers does: {why}"
    if graphs is not None and graphs.why_not is None:
        how.append("where all of it is frozen, captured in CUDA graphs while it waits for Python")
    report.record("tower", "; ".join(how), not_fused)
