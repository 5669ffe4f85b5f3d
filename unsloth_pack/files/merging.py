"""A model's weights with its adapters merged: equal to what the model computes, or refused in one line."""

import gc
import hashlib
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from unsloth_pack.errors import InputError
from unsloth_pack.files.merged_layer import REMEDY, is_finite, kind_of, merged_layer, own_weights
from unsloth_pack.files.row_blocks import base_layer_of, blocks_of, can_be_cut
from unsloth_pack.lora.quantised_stacks import dequantised_copy, is_quantised
from unsloth_pack.lora.stacks import is_experts


def merged_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model under their names before PEFT, adapters merged, in `dtype` on the CPU.

    One layer is merged at a time. A layer whose adapter PEFT's `merge_adapter` has merged is taken as it is.

    Args:
        model: a transformers model, or a PEFT model of one.

    Raises:
        InputError: an adapter that cannot be merged or is disabled; a weight that has no place in a model
            without adapters, or is not finite.
    """
    base = base_of(model)
    expected = expected_weights(base, dtype)
    merging = _Merging(model, dtype)
    for name, weight in merging.visit(base, ""):
        if name not in expected or weight.shape != expected[name].shape:
            raise _of_another_model(name, tuple(weight.shape), expected.get(name))
        del expected[name]
        yield name, weight
        del weight  # of which the next needs the memory
    for holder in [model] if isinstance(model, PeftModel) else _peft_models_of(base):
        merging.refuse_what_is_left_out(holder)
    for name, weight in expected.items():
        raise _of_another_model(name, "not there", weight)


def expected_weights(base: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a new model of a model's configuration, in `dtype`, as meta tensors."""
    assert isinstance(base, PreTrainedModel)
    config = type(base.config).from_dict(base.config.to_dict())  # without the attention that a patch sets
    with torch.device("meta"):
        fresh = type(base)(config).state_dict()
    return {name: w.to(dtype) if w.is_floating_point() else w for name, w in fresh.items()}


def are_equal_merged(model: nn.Module, one: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two merged weights are equal, such as those of an embedding and the head that is tied to it.

    Args:
        one, other: their names before PEFT.
    """
    base = base_of(model)
    paths = [name.rpartition(".")[0] for name in (one, other)]
    modules = [base.get_submodule(path) for path in paths]
    if not any(type(module).__module__.startswith("peft.") for module in modules):
        return getattr(modules[0], "weight", None) is getattr(modules[1], "weight", None)
    digests = [_digest(model, path, dtype) for path in paths]
    return digests[0] == digests[1]


def _digest(model: nn.Module, path: str, dtype: torch.dtype) -> bytes:
    """Of a module's merged weights. No two of them are held at once."""
    found = hashlib.blake2b()
    for _, weight in _Merging(model, dtype).visit(base_of(model).get_submodule(path), path):
        found.update(weight.flatten().view(torch.uint8).numpy().data)
    return found.digest()


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model that PEFT wraps, or the model itself."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return base


class _Merging:
    """Walks over a model and gives its merged weights, one after the other.

    Args:
        dtype: of the weights.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._dtype = dtype
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._visited: set[int] = set()  # the modules whose parameters have been given, by id

    def visit(self, module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
        """The weights of a module that lies at `path` in the model before PEFT."""
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper | BaseTunerLayer):
            assert isinstance(module, nn.Module)
            self._visited |= set(map(id, module.modules()))
            if module.disable_adapters:
                raise InputError(f"the adapter of {path} is disabled; enable it before it is merged")
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper):
            yield from self.visit(_module_in_use(module), path)
        elif isinstance(module, BaseTunerLayer) and can_be_cut(module):
            yield from self._by_rows(module, path)
        elif isinstance(module, BaseTunerLayer):
            merged = merged_layer(module, path, self._parameters)
            for child_path, child in merged.named_modules():
                yield from self._own(child, f"{path}.{child_path}" if child_path else path)
        elif is_experts(module) and is_quantised(module):
            self._visited |= set(map(id, module.modules()))
            yield from self._own(dequantised_copy(module, self._dtype), path)
        elif type(module).__module__.startswith("peft."):
            raise InputError(f"the adapter of {path}, {kind_of(module)}, cannot be merged; {REMEDY}")
        else:
            yield from self._own(module, path)
            for name, child in module.named_children():
                yield from self.visit(child, f"{path}.{name}" if path else name)

    def refuse_what_is_left_out(self, holder: PeftModel) -> None:
        """Refuse a PEFT model that has parameters beside those that were given."""
        for path, module in holder.named_modules():
            if id(module) not in self._visited and [*module.parameters(recurse=False)]:
                kind = holder.active_peft_config.peft_type.value
                raise InputError(
                    f"the adapter is of type {kind}, and its weights in {path} cannot be merged; {REMEDY}"
                )

    def _own(self, module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
        """The weights that are the module's own, not those of its children."""
        self._visited.add(id(module))
        for name, weight in own_weights(module):
            yield self._stored(f"{path}.{name}" if path else name, weight)
            del weight

    def _by_rows(self, layer: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
        """As `_own` of the merged layer, of which only some rows are held in float32 at once."""
        base = dict(own_weights(base_layer_of(layer)))
        found = {n: torch.empty(w.shape, dtype=self._dtype, device="cpu") for n, w in base.items()}
        for rows, block in blocks_of(layer):
            merged = (
                merged_layer(block, path, self._parameters) if isinstance(block, BaseTunerLayer) else block
            )
            for name, weight in merged.named_parameters():
                found[name][rows] = weight.detach()
            del merged, weight, block
        for name in base:
            yield self._stored(f"{path}.{name}", found.pop(name))

    def _stored(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        if weight.is_meta:
            raise InputError(f"weight {name} is offloaded; load the model on one device to merge it")
        dtype = self._dtype if weight.is_floating_point() else weight.dtype
        stored = weight.detach().to("cpu", dtype).contiguous()
        if not is_finite(stored):
            raise InputError(
                f"merged weight {name} is not finite as {dtype}; the training diverged, nothing was saved"
            )
        return name, stored


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
    made = [one for one in alive if "_modules" in vars(one)]  # not one that was refused, which an error holds
    return [one for one in made if any(module is base for module in one.modules())]


def _of_another_model(name: str, shape: object, expected: Tensor | None) -> InputError:
    """A weight that a new model of this configuration lacks, has in another shape, or has alone."""
    wanted = "missing" if expected is None else tuple(expected.shape)
    return InputError(
        f"weight {name} is {shape}, and not {wanted} as in a new model of this configuration; {REMEDY}"
    )
