"""Saving a trained model, whole or not at all: the adapter alone, or merged into 16-bit weights."""

import copy
import os
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from unsloth_pack.demo import MODEL_DIR
from unsloth_pack.errors import InputError
from unsloth_pack.files.saved_names import (
    ADAPTER_CONFIG,
    CARD,
    MODEL_CONFIG,
    SAVED_BY,
    replaced_by_a_model,
    replaced_by_an_adapter,
)
from unsloth_pack.files.whole_folders import write_whole
from unsloth_pack.lora.fp8 import Fp8Linear

SaveMethod = Literal["merged_16bit", "lora"]
_USE_CACHE = "use_cache_as_loaded"  # an attribute of the base model


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: SaveMethod = "merged_16bit",
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Save a model for use without this package, or its adapter alone.

    Args:
        model: a model from `FastLanguageModel`, with or without an adapter.
        save_directory: a folder. Files are written aside and moved in at the end, as `write_whole` says. Of
            an earlier save there, all that would change what is loaded goes: weights in other files, an
            adapter, and, if a tokenizer is given, the files of an earlier one. All other files stay, also a
            README.md.
        tokenizer: saved beside the model when given.
        save_method: "merged_16bit" adds the adapter to the (dequantised) base weights in float32 and saves
            them in the model's 16-bit type, bfloat16 if it has none; "lora" saves the adapter as PEFT does.
        state_dict: the weights for "lora" to save, where the model holds only shards of them.

    Raises:
        InputError: an unknown `save_method`; "lora" without an adapter; an adapter that cannot be merged; a
            merged weight that is not finite; a folder that cannot be written to, that holds the base model of
            the adapter, or that holds a model which this function has not saved, or the adapter of a run.
    """
    if save_method not in ("merged_16bit", "lora"):
        raise InputError(f"save_method is {save_method!r}; choose 'merged_16bit' or 'lora'")
    adapted = model if isinstance(model, PeftModel) and save_method == "lora" else None
    if save_method == "lora" and adapted is None:
        raise InputError("save_method is 'lora' but the model has no adapter; use 'merged_16bit'")

    if not str(save_directory).strip():
        raise InputError(f"save_directory is {save_directory!r}; give a folder")

    target, with_tokenizer = Path(save_directory), tokenizer is not None
    _refuse_the_base_of_an_adapter(model, target)
    if adapted is not None:
        last, replaces = ADAPTER_CONFIG, replaced_by_an_adapter(target, with_tokenizer)
    else:
        last, replaces = MODEL_CONFIG, replaced_by_a_model(target, with_tokenizer)
    with write_whole(target, last=[last], replaces=replaces) as folder:
        if adapted is not None:
            adapted.save_pretrained(str(folder), state_dict=state_dict)
            if os.path.lexists(target / CARD):
                (folder / CARD).unlink(missing_ok=True)
        else:
            _write_merged(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def _refuse_the_base_of_an_adapter(model: nn.Module, target: Path) -> None:
    if not isinstance(model, PeftModel):
        return
    base = str(model.get_base_model().name_or_path)
    if os.path.isdir(base) and os.path.isdir(target) and os.path.samefile(base, target):
        raise InputError(f"{str(target)!r} holds the base model of the adapter; give another folder")


def save_demo_adapter(model: PeftModel, save_directory: str | Path, **options: Any) -> None:
    """PEFT's `save_pretrained`, kept from asking the hub for the vocabulary of a base model named "demo"."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if not any(isinstance(end, LoraLayer) for end in ends):
        has_grown = model.config.vocab_size != AutoConfig.from_pretrained(MODEL_DIR).vocab_size
        options.setdefault("save_embedding_layers", has_grown)
    PeftModel.save_pretrained(model, str(save_directory), **options)


def _write_merged(model: nn.Module, folder: Path) -> None:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    dtype = base.dtype if base.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    weights = merged_state_dict(base, dtype)
    config = copy.deepcopy(base.config)
    config.__dict__.pop("quantization_config", None)
    _restore_use_cache(base, config)
    config._name_or_path, config.dtype, config.architectures = "", dtype, [type(base).__name__]
    if config.tie_word_embeddings:
        if _untied_by_training(base):
            config.tie_word_embeddings = False
        else:
            for name in base._tied_weights_keys or ():
                weights.pop(name, None)
    as_on_the_hub = revert_weight_conversion(base, weights)  # takes stacked experts apart, as views
    copies = {name: weight.clone() for name, weight in as_on_the_hub.items()}
    save_torch_state_dict(copies, folder, metadata=SAVED_BY)
    config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def remember_use_cache(base: nn.Module) -> None:
    """Note what the configuration of a loaded model says of its cache: a trainer turns it off for good."""
    config: Any = base.config
    base.__dict__.setdefault(_USE_CACHE, config.__dict__.get("use_cache"))


def _restore_use_cache(base: PreTrainedModel, config: Any) -> None:
    if _USE_CACHE not in base.__dict__:
        return
    config.__dict__.pop("use_cache", None)
    if (was := base.__dict__[_USE_CACHE]) is not None:
        config.use_cache = was


def merged_state_dict(base: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `base` under their names before PEFT, adapters merged, in `dtype` on the CPU.

    Raises:
        InputError: an adapter that cannot be merged; a merged weight that is not finite.
    """
    weights: dict[str, Tensor] = {}

    def visit(module: nn.Module, path: str) -> None:
        if isinstance(module, ParamWrapper):
            visit(module.get_base_layer(), path)
            while isinstance(module, ParamWrapper):  # nested, each for one parameter
                name = f"{path}.{module.parameter_name}"
                weights[name] = _with_deltas(weights[name], module)
                module = module.base_layer
            return
        if isinstance(module, LoraLayer):
            base_layer = module.get_base_layer()
            if not isinstance(base_layer, nn.Linear):
                kind = type(base_layer).__name__
                raise InputError(f"the adapter of {path} is on a {kind}; save it with save_method 'lora'")
            weights[f"{path}.weight"] = _merged_weight(module, base_layer)
            if base_layer.bias is not None:
                weights[f"{path}.bias"] = _merged_bias(module, base_layer.bias)
            return
        if isinstance(module, ModulesToSaveWrapper):
            return visit(module.modules_to_save[module.active_adapters[0]], path)
        for name, parameter in module.named_parameters(recurse=False):
            is_weight = name == "weight"
            weights[f"{path}.{name}"] = _weight(module) if is_weight else parameter
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(base, "")
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise InputError(f"merged weight {name} is not finite; the training diverged, nothing was saved")
    return {
        name: weight.detach().to("cpu", dtype, copy=True).contiguous() for name, weight in weights.items()
    }


def _weight(module: nn.Module) -> Tensor:
    if isinstance(module, Fp8Linear):
        return module.rows.dequantized(torch.float32)
    return dequantize_module_weight(module)


@runtime_checkable
class _HasDeltas(Protocol):
    """LoRA layers have it, though not their base class."""

    def get_delta_weight(self, adapter: str) -> Tensor: ...


def _merged_weight(layer: LoraLayer, base_layer: nn.Linear) -> Tensor:
    assert isinstance(layer, _HasDeltas)
    weight = _weight(base_layer).detach().float()
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        delta = layer.get_delta_weight(adapter).detach().float()
        if adapter in layer.lora_magnitude_vector:  # DoRA (Liu et al. 2024): a learned norm for every output
            magnitude = layer.lora_magnitude_vector[adapter]
            assert isinstance(magnitude, DoraLinearLayer)
            norm = magnitude.get_weight_norm(weight, delta, scaling=1).detach()
            weight = (magnitude.weight.detach().float() / norm)[:, None] * (weight + delta)
        else:
            weight = weight + delta
    return weight


def _with_deltas(weight: Tensor, layer: ParamWrapper) -> Tensor:
    """Stacked experts, `[experts, in, out]` or `[experts, out, in]`, with all active adapters merged."""
    weight = weight.detach().float()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            weight = weight + layer.get_delta_weight(adapter).detach().float()
    return weight


def _merged_bias(layer: LoraLayer, bias: Tensor) -> Tensor:
    bias = bias.detach().float()
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_B:
            continue
        lora_b = layer.lora_B[adapter]
        assert isinstance(lora_b, nn.Linear)
        if lora_b.bias is not None:
            bias = bias + lora_b.bias.detach().float() * layer.scaling[adapter]
    return bias


def _untied_by_training(base: PreTrainedModel) -> bool:
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    return any(isinstance(end, ModulesToSaveWrapper | LoraLayer) for end in ends)
