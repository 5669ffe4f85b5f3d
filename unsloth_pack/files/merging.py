"""A model's weights with its adapters merged: equal to what the model computes, or refused in one line."""

import gc

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from unsloth_pack.errors import InputError
from unsloth_pack.files.merged_layer import REMEDY, is_finite, kind_of, merged_layer, own_weights
from unsloth_pack.lora.quantised_stacks import dequantised_copy, is_quantised
from unsloth_pack.lora.stacks import is_experts


def merged_state_dict(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a model under their names before PEFT, adapters merged, in `dtype` on the CPU.

    A layer whose adapter PEFT's `merge_adapter` has merged is taken as it is.

    Args:
        model: a transformers model, or a PEFT model of one.

    Raises:
        InputError: an adapter that cannot be merged or is disabled; a weight that has no place in a model
            without adapters, or is not finite.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    merging = _Merging(model, dtype)
    merging.visit(base, "")
    for holder in [model] if isinstance(model, PeftModel) else _peft_models_of(base):
        merging.refuse_what_is_left_out(holder)
    _refuse_other_names(base, merging.weights)
    return merging.weights


class _Merging:
    """Walks over a model and collects its weights.

    Args:
        dtype: of the collected weights.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.weights: dict[str, Tensor] = {}
        self._dtype = dtype
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._visited: set[int] = set()  # the modules whose parameters are in `weights`, by id

    def visit(self, module: nn.Module, path: str) -> None:
        """Collect the weights of a module that lies at `path` in the model before PEFT."""
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper | BaseTunerLayer):
            assert isinstance(module, nn.Module)
            self._visited |= set(map(id, module.modules()))
            if module.disable_adapters:
                raise InputError(f"the adapter of {path} is disabled; enable it before it is merged")
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper):
            self.visit(_module_in_use(module), path)
        elif isinstance(module, BaseTunerLayer):
            for child_path, child in merged_layer(module, path, self._parameters).named_modules():
                self._collect(child, f"{path}.{child_path}" if child_path else path)
        elif is_experts(module) and is_quantised(module):
            self._visited |= set(map(id, module.modules()))
            self._collect(dequantised_copy(module, self._dtype), path)
        elif type(module).__module__.startswith("peft."):
            raise InputError(f"the adapter of {path}, {kind_of(module)}, cannot be merged; {REMEDY}")
        else:
            self._collect(module, path)
            for name, child in module.named_children():
                self.visit(child, f"{path}.{name}" if path else name)

    def refuse_what_is_left_out(self, holder: PeftModel) -> None:
        """Refuse a PEFT model that has parameters beside those that were collected."""
        for path, module in holder.named_modules():
            if id(module) not in self._visited and [*module.parameters(recurse=False)]:
                kind = holder.active_peft_config.peft_type.value
                raise InputError(
                    f"the adapter is of type {kind}, and its weights in {path} cannot be merged; {REMEDY}"
                )

    def _collect(self, module: nn.Module, path: str) -> None:
        """Collect the weights that are the module's own, not those of its children."""
        self._visited.add(id(module))
        for name, weight in own_weights(module):
            full_name = f"{path}.{name}" if path else name
            if weight.is_meta:
                raise InputError(f"weight {full_name} is offloaded; load the model on one device to merge it")
            dtype = self._dtype if weight.is_floating_point() else weight.dtype
            stored = weight.detach().to("cpu", dtype, copy=True).contiguous()
            if not is_finite(stored):
                raise InputError(
                    f"merged weight {full_name} is not finite as {dtype}; the training diverged, nothing was "
                    "saved"
                )
            self.weights[full_name] = stored


def _module_in_use(wrapper: ModulesToSaveWrapper | TrainableTokensWrapper) -> nn.Module:
    """The module that a wrapper calls."""
    if isinstance(wrapper, TrainableTokensWrapper):
        return wrapper.token_adapter
    active = wrapper.active_adapters
    in_use = bool(active) and all(adapter in wrapper.modules_to_save for adapter in active)
    return wrapper.modules_to_save[active[0]] if in_use else wrapper.original_module


def has_adapter(model: nn.Module) -> bool:
    """Whether PEFT has put an adapter on a model, which may be the model that PEFT wraps."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules()) or bool(
        _peft_models_of(model)
    )


def _peft_models_of(base: nn.Module) -> list[PeftModel]:
    """The PEFT models around a transformers model.

    A method that a PEFT model lacks runs on its transformers model, which does not know its PEFT model.
    """
    alive = [one for one in gc.get_objects() if issubclass(type(one), PeftModel)]
    return [one for one in alive if any(module is base for module in one.modules())]


def _refuse_other_names(base: nn.Module, weights: dict[str, Tensor]) -> None:
    """Refuse weights that a new model of this configuration lacks, or has in another shape."""
    assert isinstance(base, PreTrainedModel)
    config = type(base.config).from_dict(base.config.to_dict())  # without the attention that a patch sets
    with torch.device("meta"):
        fresh = type(base)(config).state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    expected = {name: tuple(weight.shape) for name, weight in fresh.items()}
    if wrong := sorted(dict(shapes.items() ^ expected.items())):
        raise InputError(
            f"weight {wrong[0]} is {shapes.get(wrong[0], 'not there')}, and not "
            f"{expected.get(wrong[0], 'missing')} as in a new model of this configuration; {REMEDY}"
        )
