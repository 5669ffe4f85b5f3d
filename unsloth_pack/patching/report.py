"""Report what a patch fuses, what it does not, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.cuda_graphs.tower import TowerGraphs
from unsloth_pack.layers.forward_slot import read_trl_head
from unsloth_pack.layers.layer import is_plain, trains_tokens
from unsloth_pack.layers.mixers import Choice
from unsloth_pack.layers.moe import read_gate, why_experts_not_fused, why_reads_host
from unsloth_pack.layers.rotary import rotary_module
from unsloth_pack.layers.unpadding import Unpadding
from unsloth_pack.lora.expert_stacks import is_expert_adapter, is_quantised, why_adapter_not_fused
from unsloth_pack.lora.linear import is_lora_linear, why_not_fused
from unsloth_pack.lora.quantised import Fp8Linear, is_linear_4bit
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
    """Report what patching these parts does; `report_step` adds whether steps are captured."""
    decoder = base.get_decoder()
    on_gpu = decoder.get_input_embeddings().weight.device.type == "cuda"
    how = "in one kernel" if on_gpu else "in plain torch on a CPU"
    fused: dict[str, str] = {}
    not_fused: dict[str, str] = {}
    if trains_tokens(decoder.get_input_embeddings()):
        fused["trained tokens"] = "looked up in a matrix of their own"
    for mixer, module, _ in parts.mixers:
        for entries, more in zip((fused, not_fused), mixer.what_is_fused(module, spec, how), strict=True):
            entries |= more
    if rotary_module(decoder, spec) is None:
        for kind in ("rotary embedding", "QK norm"):
            fused.pop(kind, None)
    kind = {"rms": "RMS", "layer": "layer"}[spec.norm]
    fused["norms"] = f"{len(parts.norms)} {kind} norms, each {how}"
    if n_plain := sum(map(is_plain, decoder.layers)):
        fused["norms"] += f", with the sums of residuals in {n_plain} of {len(decoder.layers)} layers"
    gated_mlps = [mlp for _, mlp, projections in parts.mlps if projections is not None]
    if gated_mlps:
        fused["MLP"] = f"activation and product of {len(gated_mlps)} of {len(parts.mlps)} layers {how}"
    if len(gated_mlps) < len(parts.mlps):
        kinds = {type(mlp).__name__ for _, mlp, projections in parts.mlps if projections is None}
        not_fused["MLP"] = f"{', '.join(sorted(kinds))} of {len(parts.mlps) - len(gated_mlps)} layers"
    if parts.activations:
        kinds = {type(activation).__name__ for activation in parts.activations}
        fused["activation"] = f"{len(parts.activations)} of {', '.join(sorted(kinds))}, each {how}"
    if n_fp8 := sum(isinstance(module, Fp8Linear) for module in decoder.modules()):
        fused["base"] = f"{n_fp8} frozen linear layers in fp8"
    if n_nf4 := sum(is_linear_4bit(lora.get_base_layer()) for lora in parts.loras):
        fused["base"] = f"{n_nf4} frozen linear layers in 4 bits, dequantised at each use"
    report = PatchReport(
        model_type=spec.model_type,
        n_layers=len(decoder.layers),
        attn_backend=" and ".join(dict.fromkeys(choice.name for choice in choices)),
        attn_reason="; ".join(dict.fromkeys(choice.reason for choice in choices)),
        fused=fused,
        not_fused=not_fused,
    )
    report_loss(report, base)
    report_experts(report, [(experts, gate is not None) for _, experts, gate in parts.experts])
    report_loras(report, [*parts.loras, *parts.expert_loras], parts.other_loras)
    return report


def record(report: PatchReport, kind: str, fused: str | None, not_fused: str | None) -> None:
    """Replace the report on a kind of layer."""
    for entries, text in ((report.fused, fused), (report.not_fused, not_fused)):
        if text:
            entries[kind] = text
        else:
            entries.pop(kind, None)


def report_loss(report: PatchReport, model: nn.Module) -> None:
    """Report whether the loss of a causal language model is fused with its head."""
    if (why := why_loss_not_fused(model)) is None:
        record(report, "loss", "with the head, for tokens that have a label", None)
    else:
        record(report, "loss", None, f"from the logits of all tokens: {why}")
    trl_head = read_trl_head(model)
    if trl_head is None:
        record(report, "TRL's loss", None, None)
    elif why := trl_head.why_not or why_head_not_fused(model):
        record(report, "TRL's loss", None, f"in TRL's chunks of logits: {why}")
    else:
        record(report, "TRL's loss", "from the same kernel", None)


def report_experts(report: PatchReport, experts: list[tuple[Any, bool]]) -> None:
    """Report how many layers of routed experts are fused; each comes with whether the patch covers it."""
    reasons = Counter(
        why_experts_not_fused(one) if is_covered else "no kernel computes what they do with gate and up"
        for one, is_covered in experts
    )
    n_fused = reasons.pop(None, 0)
    how = f"{n_fused} layers, each as one autograd node"
    if n_fused and (why := why_reads_host(experts[0][0])):
        how += f"; one expert after another: {why}"
    if n_fused and is_quantised(experts[0][0]):
        how += "; their weights are dequantised at each use"
    not_fused = ", ".join(f"{n} layers: {reason}" for reason, n in reasons.items())
    record(report, "experts", how if n_fused else None, not_fused)


def report_loras(report: PatchReport, loras: list[Any], other_loras: list[Any]) -> None:
    """Report how many LoRA layers are fused. The patch does not cover `other_loras`."""
    reasons = Counter(_why_lora_not_fused(lora) for lora in loras)
    reasons.update(
        "added after the patch; call patch_model again"
        if is_lora_linear(lora) or is_expert_adapter(lora)
        else f"on a {type(lora.get_base_layer()).__name__}"
        for lora in other_loras
    )
    n_fused = reasons.pop(None, 0)
    how = f"{n_fused} layers; those over one input, and those of an MLP, as one autograd node"
    why = ", ".join(f"{n} layers: {reason}" for reason, n in reasons.items())
    record(report, "LoRA", how if n_fused else None, why)


def _why_lora_not_fused(lora: Any) -> str | None:
    if not is_expert_adapter(lora):
        return why_not_fused(lora)
    experts = lora.get_base_layer()
    if read_gate(experts) is None or why_experts_not_fused(experts):
        return "its experts are not fused"
    return why_adapter_not_fused(lora)


def report_step(report: PatchReport, graphs: StepGraphs) -> None:
    """Report whether steps are captured."""
    if graphs.why_not is None:
        record(report, "step", "captured in CUDA graphs while it waits for Python, see `StepGraphs`", None)
    else:
        record(report, "step", None, f"not captured in CUDA graphs: {graphs.why_not}")


def report_tower(
    report: PatchReport, n_layers: int, backend: str | None, why: str, graphs: TowerGraphs | None = None
) -> None:
    """Report how a vision tower attends, and whether it is captured.

    Args:
        backend: of its attention; None where that stays transformers' own.
        why: the reason for that.
        graphs: of the tower; None where no graph can hold it.
    """
    how = [f"all images of a row in one call a layer, {n_layers} layers, through {backend} ({why})"]
    not_fused = None
    if backend is None:
        how, not_fused = [], f"{n_layers} layers attend as transformers does: {why}"
    if graphs is not None and graphs.why_not is None:
        how.append("where all of it is frozen, captured in CUDA graphs while it waits for Python")
    record(report, "tower", "; ".join(how) or None, not_fused)


def report_padding(report: PatchReport, unpadding: Unpadding) -> None:
    """Report whether padded batches lose their padding, and how many kept it."""
    if unpadding.why_never is not None:
        return record(report, "padding", None, unpadding.why_never)
    why = "; ".join(f"kept in {n} batches: {reason}" for reason, n in unpadding.kept.items())
    record(report, "padding", "taken out of batches in training, and where no cache is made", why)
