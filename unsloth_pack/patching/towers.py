"""Swap the classes of the towers of models of vision and language."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from unsloth_pack.attention import AttentionNeed, AttentionOptions, choose_backend, why_unavailable
from unsloth_pack.attention.backends import choose_able, why_not_captured
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.cuda_graphs.tower import TowerGraphs
from unsloth_pack.layers.layer import FastRMSNorm
from unsloth_pack.layers.mixers import Choice, Request
from unsloth_pack.layers.mixers.attention import read_attention_options
from unsloth_pack.layers.vision.tower import (
    NORMS,
    READ_ON_HOST,
    FastPatchEmbed,
    FastTower,
    FastTowerAttention,
    FastTowerMLP,
    FastTowerNorm,
    FastVariableSizeAttention,
    FastVariableSizeTower,
    FrozenTower,
)
from unsloth_pack.lora.linear import FastLoraLinear, is_lora_linear
from unsloth_pack.models.spec import ArchSpec, VisionSpec
from unsloth_pack.patching.report import PatchReport, report_tower

Swap = Callable[..., None]  # Patch.swap


def swap_tower(
    swap: Swap, report: PatchReport, base: PreTrainedModel, spec: VisionSpec, backend: str
) -> None:
    """Swap the classes of the tower of `base`, and report how it attends; `backend` may be "auto"."""
    tower = base.base_model.get_submodule(spec.tower)
    if spec.attends == "batch":
        _swap_for_batch(swap, report, tower, spec)
    else:
        _swap_for_rows(swap, report, tower, spec, backend)
    for path, module in tower.named_modules():
        name = path.rpartition(".")[2]
        if is_lora_linear(module):
            swap(module, FastLoraLinear)
        elif type(module) is nn.LayerNorm and name in NORMS:
            swap(module, FastTowerNorm)
        elif name in spec.rms_norms and not isinstance(module, AuxiliaryTrainingWrapper):
            swap(module, FastRMSNorm, norm_offset=0.0, norm_keeps_dtype=False)
        elif name == spec.gated_mlp and "gate_proj" in dict(module.named_children()):
            swap(module, FastTowerMLP)


def prepare_blocks(
    report: PatchReport,
    layers: Iterable[tuple[Any, Choice]],
    spec: ArchSpec,
    request: Request,
    graphs: StepGraphs,
) -> None:
    """Choose and report the backend for images whose tokens see each other in both directions.

    The graphs of the text model may hold such rows if they may hold that backend.
    """
    chosen, windows = set(), set()
    for module, choice in layers:
        options = replace(read_attention_options(module, spec), causal=False)
        windows.add(options.window)
        need = AttentionNeed(request.device_type, request.dtype, module.head_dim, options)
        chosen.add(choose_able(choice.name, need, "takes_other_keys"))
    if not any(map(why_not_captured, chosen)):
        graphs.windows = frozenset(windows)
    how = f"by a second call a layer through {' and '.join(sorted(chosen))}"
    report.record("image tokens", f"see each other in both directions, {how}")


def _swap_for_rows(swap: Swap, report: PatchReport, tower: Any, spec: VisionSpec, backend: str) -> None:
    """Swap a tower that takes the patches of all images in one row."""
    if spec.attends == "grids":
        attentions, weight = [block.attn for block in tower.blocks], tower.patch_embed.proj.weight
        kinds: tuple[type, type] = FastTower, FastTowerAttention
        drops = None
        swap(tower.patch_embed, FastPatchEmbed, is_frozen=False)
    else:
        attentions, weight = [layer.attention for layer in tower.transformer.layers], tower.patch_conv.weight
        kinds, drops = (FastVariableSizeTower, FastVariableSizeAttention), _dropout(tower)
    if drops:
        swap(tower, FrozenTower, tower_graphs=TowerGraphs(drops))
        return report_tower(report, len(attentions), None, drops)
    chosen, why, graphs = _choose_backend(attentions[0], weight, backend)
    swap(tower, kinds[0], vision_spec=spec, tower_graphs=graphs)
    for attention in attentions:
        swap(attention, kinds[1], attn_backend=chosen)
    report_tower(report, len(attentions), chosen, why, graphs)


def _swap_for_batch(swap: Swap, report: PatchReport, tower: Any, spec: VisionSpec) -> None:
    """Swap a tower that takes images of one size as a batch."""
    why_never = _dropout(tower) or (READ_ON_HOST if "pixel_attention_mask" in spec.options else None)
    if not next(tower.parameters()).is_cuda:
        why_never = "CUDA graphs need CUDA"
    graphs = TowerGraphs(why_never, unit="images")
    swap(tower, FrozenTower, tower_graphs=graphs)
    report_tower(report, tower.config.num_hidden_layers, None, "images of one size are a batch", graphs)


def _dropout(tower: nn.Module) -> str | None:
    """Return what attention drops at random without a module of its own, or None."""
    p = getattr(tower.config, "attention_dropout", 0)
    return f"attention_dropout is {p}" if p else None


def _choose_backend(attention: Any, weight: Tensor, requested: str) -> tuple[str, str, TowerGraphs]:
    """Choose a tower's attention backend, else another than requested; say why, and start its graphs."""
    options = AttentionOptions(attention.scaling, causal=False)
    need = AttentionNeed(weight.device.type, weight.dtype, attention.head_dim, options)
    why_not = None if requested == "auto" else why_unavailable(requested, need)
    chosen, why = choose_backend("auto" if why_not else requested, need)
    graphs = TowerGraphs(why_not_captured(chosen) if weight.is_cuda else "CUDA graphs need CUDA")
    return chosen, f"{requested}: {why_not}; {why}" if why_not else why, graphs
