"""A model's weights with its adapters merged: equal to what the model computes, or refused in one line."""

import copy
import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from unsloth_pack.checkpoints.loading import is_finite
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.lora.expert_stacks import dequantised_copy, is_experts, is_quantised
from unsloth_pack.lora.quantised import Fp8Linear, is_linear_4bit, why_not_dequantised
from unsloth_pack.modules import base_of

REMEDY = "save the adapter alone, with PEFT's save_pretrained"
# How far the largest output may move when sums are taken in another order: far above float32's rounding, and
# below that of the 16 bits that weights are saved in
_TOLERANCE = 1e-4
_QUANTISED_TOLERANCE = 0.1  # layers in few bits round their inputs too
_N_PROBES = 32  # vectors that two layers are compared on
_N_IDS = 4096  # rows of an embedding that are compared, beside those that are trained by themselves
_LARGE = 2**29  # numbers; a larger layer, such as an embedding, is merged on the CPU: 2 GiB for each copy


def merged_layer(layer: Any, path: str, parameters: dict[int, nn.Parameter]) -> nn.Module:
    """The base layer with its active adapters merged, in float32; as it is if they are merged already.

    PEFT merges a copy, whose outputs must stay the same. `parameters` are those of the whole model, by id: a
    layer may refer to those of others, which are not copied.
    """
    wrappers = [*_tuner_layers(layer)]
    if any(wrapper.merged for wrapper in wrappers):
        if left_out := [adapter for wrapper in wrappers for adapter in _active_but_not_merged(wrapper)]:
            said = f"in {path} adapter {left_out[0]!r} is active, but only others are merged"
            raise InputError(f"{said}; call unmerge_adapter() first")
        base: nn.Module = layer.get_base_layer()
        return base
    own = {id(parameter) for parameter in layer.parameters()}
    shared = {key: parameter for key, parameter in parameters.items() if key not in own}
    try:
        with torch.no_grad(), _exact_float32(layer), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of what is checked here
            merged, agrees = _merge_copy(layer, shared)
        why = "PEFT's merged layer computes something else"
    except (torch.OutOfMemoryError, InputError):
        raise
    except Exception as error:  # a tuner that cannot merge raises what it likes
        agrees, why = False, first_line(error).rstrip(".") or f"PEFT raises {type(error).__name__}"
    if not agrees:
        raise InputError(f"the adapter of {path}, {kind_of(layer)}, cannot be merged: {why}; {REMEDY}")
    return merged


def _merge_copy(layer: Any, shared: dict[int, nn.Parameter]) -> tuple[nn.Module, bool]:
    """A merged copy of the base layer in float32, and whether it computes what `layer` does."""
    base = layer.get_base_layer()
    with _CopyWithoutGraph():
        copied = copy.deepcopy(layer, {**shared, id(base): _float32_copy(base)}).float().eval()
    if sum(parameter.numel() for parameter in copied.parameters()) > _LARGE:
        copied = copied.cpu()
    wrappers = [*_tuner_layers(copied)]
    for wrapper in wrappers:
        _expect_float_base(wrapper)
    # A stack of experts is no function of one tensor; PEFT's forward adds to it what its merge adds.
    probes = [] if isinstance(layer, ParamWrapper) else [_probe(layer, copied.get_base_layer())]
    before = [copied(x) for x in probes]
    for wrapper in reversed(wrappers):  # from the inside
        wrapper.merge()
    merged = copied.get_base_layer()
    if not all(map(is_finite, merged.parameters())):
        return merged, True  # refused by the name of the weight
    for x, expected in zip(probes, before, strict=True):
        output = merged(x)
        if not _agree(output, expected, _TOLERANCE):
            return merged, False
        # Some tuners read the bytes of a quantised weight as if they were its numbers
        is_quantised_layer = any(p.element_size() == 1 for p in base.parameters())
        if is_quantised_layer and not _agree(output, _called(layer, x), _QUANTISED_TOLERANCE):
            return merged, False
    return merged, True


class _CopyWithoutGraph(TorchFunctionMode):
    """Deep copies take tensors of a past call, which some layers keep and torch refuses to copy."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return function(*args, **(kwargs or {}))


def _tuner_layers(layer: Any) -> Iterator[Any]:
    """The layer and those that it wraps: PEFT nests one for each parameter of a stack of experts."""
    base = layer.get_base_layer()
    while layer is not base:
        yield layer
        layer = layer.base_layer


def _active_but_not_merged(layer: Any) -> list[str]:
    own = {adapter for name in layer.adapter_layer_names for adapter in getattr(layer, name)}
    return [adapter for adapter in layer.active_adapters if adapter in own - {*layer.merged_adapters}]


def _float32_copy(layer: nn.Module) -> nn.Module:
    """The layer in float32, dequantised, with its trained tokens if it has any."""
    if isinstance(layer, TrainableTokensWrapper):  # of a head that is tied, below its LoRA
        tokens = layer.token_adapter
        merged: nn.Module = _float32_copy(tokens.get_base_layer())
        if not (tokens.merged or layer.disable_adapters):
            merged.weight = nn.Parameter(tokens.get_merged_weights(tokens.active_adapters).detach().float())
        return merged
    if is_experts(layer):
        return dequantised_copy(layer, torch.float32)
    if not isinstance(layer, nn.Linear):
        return copy.deepcopy(layer).float()
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    for name, weight in _own_weights(layer):
        plain.register_parameter(name, nn.Parameter(weight.detach().to(torch.float32, copy=True)))
    return plain


def _expect_float_base(layer: Any) -> None:
    """Make a tuner layer over a quantised layer one over a plain layer."""
    layer.quantization_backend = None
    package, _, module = type(layer).__module__.rpartition(".")
    if module == "bnb":  # its classes have the same names as those of plain layers, and a suffix
        plain = importlib.import_module(f"{package}.layer")
        layer.__class__ = getattr(plain, type(layer).__name__.removesuffix("4bit").removesuffix("8bitLt"))
        layer.__dict__.setdefault("fan_in_fan_out", False)


def _probe(layer: Any, base: nn.Module) -> Tensor:
    """An input that shows what a layer computes: ids of an embedding, else random vectors."""
    weight = base.weight
    assert isinstance(weight, Tensor)
    if isinstance(base, nn.Embedding):
        last = base.num_embeddings - 1
        ids = {round(last * place / _N_IDS) for place in range(_N_IDS + 1)}
        ids.update(*getattr(layer, "token_indices", {}).values())
        return torch.tensor(sorted(ids), device=weight.device)[None]
    size = base.in_features if isinstance(base, nn.Linear) else weight.shape[-1]
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, _N_PROBES, size, generator=generator).to(weight.device)


def _called(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer as it is, with its quantised weight, without dropout."""
    training = {module: module.training for module in layer.modules()}
    base = layer.get_base_layer()
    x = x.to(base.weight.device, getattr(base, "compute_dtype", None) or x.dtype)
    try:
        # bitsandbytes packs weights for inference on a CPU, unless the input needs a gradient
        y: torch.Tensor = layer.eval().forward(x.requires_grad_())
        return y.float()
    finally:
        for module, was in training.items():
            module.training = was


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    difference = one - other.to(one.device)
    return bool(difference.abs().max() <= tolerance * other.abs().max())


def kind_of(layer: Any) -> str:
    """A tuner as PEFT calls it, with the variants of LoRA."""
    tuner = type(layer).__module__.split(".")[2].upper()  # peft.tuners.ia3.layer
    variants = {
        type(one).__name__.removesuffix("Variant") for one in getattr(layer, "lora_variant", {}).values()
    }
    return " ".join([tuner, *sorted(variants)])


@contextmanager
def _exact_float32(layer: nn.Module) -> Iterator[None]:
    """Compute in float32 where `layer` lies, even if the caller has allowed less, by TF32 or autocast."""
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    precisions = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(next(layer.parameters()).device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


def _own_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, dequantised, and the buffers that a saved model holds."""
    if isinstance(module, nn.Linear):
        yield "weight", _weight(module)
        if module.bias is not None:
            yield "bias", module.bias
        return
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _weight(linear: nn.Linear) -> Tensor:
    if isinstance(linear, Fp8Linear):
        return linear.rows.dequantized(torch.float32)
    if is_linear_4bit(linear) and (why := why_not_dequantised(linear)):
        raise InputError(f"a linear layer cannot be merged: {why}; load the model anew and merge it first")
    weight = linear.weight
    try:
        return dequantize_module_weight(linear)
    finally:
        linear.weight = weight  # of int8 on a CPU, PEFT leaves a weight that cannot be called


def merged_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model under their names before PEFT, adapters merged, in `dtype` on the CPU.

    One layer is merged at a time. A layer whose adapter PEFT's `merge_adapter` has merged is taken as it is.
    InputError for an adapter that cannot be merged or is disabled, and for a weight that is not finite or has
    no place in a model without adapters.
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
        for path, module in holder.named_modules():
            if id(module) not in merging.visited and [*module.parameters(recurse=False)]:
                kind = holder.active_peft_config.peft_type.value
                said = f"the adapter is of type {kind}, and its weights in {path} cannot be merged"
                raise InputError(f"{said}; {REMEDY}")
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
    """Whether two merged weights, by their names before PEFT, are equal, such as those of tied ends."""
    base = base_of(model)
    paths = [name.rpartition(".")[0] for name in (one, other)]
    modules = [base.get_submodule(path) for path in paths]
    if not any(type(module).__module__.startswith("peft.") for module in modules):
        return getattr(modules[0], "weight", None) is getattr(modules[1], "weight", None)
    merging = _Merging(model, dtype)
    ours, theirs = (list(merging.visit(*each)) for each in zip(modules, paths, strict=True))
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(ours, theirs, strict=True))


class _Merging:
    """Walks over a model and gives its merged weights in `dtype`, one after the other."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._dtype = dtype
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.visited: set[int] = set()  # the modules whose parameters have been given, by id

    def visit(self, module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
        """The weights of a module that lies at `path` in the model before PEFT."""
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper | BaseTunerLayer):
            assert isinstance(module, nn.Module)
            self.visited |= set(map(id, module.modules()))
            if module.disable_adapters:
                raise InputError(f"the adapter of {path} is disabled; enable it before it is merged")
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper):
            yield from self.visit(_module_in_use(module), path)
        elif isinstance(module, BaseTunerLayer):
            merged = merged_layer(module, path, self._parameters)
            for child_path, child in merged.named_modules():
                yield from self._own(child, f"{path}.{child_path}" if child_path else path)
        elif is_experts(module) and is_quantised(module):
            self.visited |= set(map(id, module.modules()))
            yield from self._own(dequantised_copy(module, self._dtype), path)
        elif type(module).__module__.startswith("peft."):
            raise InputError(f"the adapter of {path}, {kind_of(module)}, cannot be merged; {REMEDY}")
        else:
            yield from self._own(module, path)
            for name, child in module.named_children():
                yield from self.visit(child, f"{path}.{name}" if path else name)

    def _own(self, module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
        """The weights that are the module's own, not those of its children."""
        self.visited.add(id(module))
        for name, weight in _own_weights(module):
            dtype = self._dtype if weight.is_floating_point() else weight.dtype
            stored = weight.detach().to("cpu", dtype).contiguous()
            whole_name = f"{path}.{name}" if path else name
            if not is_finite(stored):
                said = f"merged weight {whole_name} is not finite as {dtype}"
                raise InputError(f"{said}; the training diverged, nothing was saved")
            yield whole_name, stored
            del weight, stored


def _module_in_use(wrapper: ModulesToSaveWrapper | TrainableTokensWrapper) -> nn.Module:
    """The module that a wrapper calls."""
    if isinstance(wrapper, TrainableTokensWrapper):
        return wrapper.token_adapter
    active = wrapper.active_adapters
    in_use = bool(active) and all(adapter in wrapper.modules_to_save for adapter in active)
    return wrapper.modules_to_save[active[0]] if in_use else wrapper.original_module


def _peft_models_of(base: nn.Module) -> list[PeftModel]:
    """The PEFT models around a transformers model.

    A method that a PEFT model lacks runs on its transformers model, which does not know its PEFT model.
    """
    alive = [one for one in gc.get_objects() if issubclass(type(one), PeftModel)]
    whole = [one for one in alive if "_modules" in vars(one)]  # an error may hold one that was refused
    return [one for one in whole if any(module is base for module in one.modules())]


def _of_another_model(name: str, shape: object, expected: Tensor | None) -> InputError:
    """A weight that a new model of this configuration lacks, has in another shape, or has alone."""
    wanted = "missing" if expected is None else tuple(expected.shape)
    return InputError(
        f"weight {name} is {shape}, and not {wanted} as in a new model of this configuration; {REMEDY}"
    )
