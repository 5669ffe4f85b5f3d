"""One layer with its adapters merged. PEFT merges a float32 copy, whose outputs must stay the same."""

import copy
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unsloth_pack.errors import InputError, first_line
from unsloth_pack.lora.fp8 import Fp8Linear
from unsloth_pack.lora.nf4 import is_linear_4bit, why_not_dequantised
from unsloth_pack.lora.quantised_stacks import dequantised_copy
from unsloth_pack.lora.stacks import is_experts

REMEDY = "save the adapter alone, with PEFT's save_pretrained"
# How far the largest output may move when sums are taken in another order: far above float32's rounding, and
# below that of the 16 bits that weights are saved in
_TOLERANCE = 1e-4
_QUANTISED_TOLERANCE = 0.1  # layers in few bits round their inputs too
_N_PROBES = 32  # vectors that two layers are compared on
_N_IDS = 4096  # rows of an embedding that are compared, beside those that are trained by themselves


def merged_layer(layer: Any, path: str, parameters: dict[int, nn.Parameter]) -> nn.Module:
    """The base layer with its active adapters merged, in float32; as it is if they are merged already.

    Args:
        parameters: of the whole model, by id. A layer may refer to those of others, which are not copied.

    Raises:
        InputError: PEFT cannot merge it, or merges something else than it computes.
    """
    wrappers = [*_tuner_layers(layer)]
    if any(wrapper.merged for wrapper in wrappers):
        if left_out := [adapter for wrapper in wrappers for adapter in _active_but_not_merged(wrapper)]:
            raise InputError(
                f"in {path} adapter {left_out[0]!r} is active, but only others are merged; call "
                "unmerge_adapter() first"
            )
        return layer.get_base_layer()
    own = {id(parameter) for parameter in layer.parameters()}
    shared = {key: parameter for key, parameter in parameters.items() if key not in own}
    try:
        with torch.no_grad(), _exact_float32(layer), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of what is checked here
            merged, agrees = _merge_copy(layer, shared)
    except (torch.OutOfMemoryError, InputError):
        raise
    except Exception as error:  # a tuner that cannot merge raises what it likes
        reason = first_line(error).rstrip(".") or f"PEFT raises {type(error).__name__}"
        raise InputError(
            f"the adapter of {path}, {kind_of(layer)}, cannot be merged: {reason}; {REMEDY}"
        ) from error
    if not agrees:
        raise InputError(
            f"the adapter of {path}, {kind_of(layer)}, cannot be merged: PEFT's merged layer computes "
            f"something else; {REMEDY}"
        )
    return merged


def _merge_copy(layer: Any, shared: dict[int, nn.Parameter]) -> tuple[nn.Module, bool]:
    """A merged copy of the base layer in float32, and whether it computes what `layer` does."""
    base = layer.get_base_layer()
    with _CopyWithoutGraph():
        copied = copy.deepcopy(layer, {**shared, id(base): _float32_copy(base)}).float().eval()
    wrappers = [*_tuner_layers(copied)]
    for wrapper in wrappers:
        _expect_float_base(wrapper)
    # A stack of experts is no function of one tensor; PEFT's forward adds to it what its merge adds.
    probes = [] if isinstance(layer, ParamWrapper) else _probes(layer, base)
    before = [copied(x) for x in probes]
    for wrapper in reversed(wrappers):  # from the inside
        wrapper.merge()
    merged = copied.get_base_layer()
    if not all(map(is_finite, merged.parameters())):
        return merged, True  # refused by the name of the weight
    after = [merged(x) for x in probes]
    agree = all(_agree(one, other, _TOLERANCE) for one, other in zip(after, before, strict=True))
    if agree and not _is_plain(base):
        # Some tuners read the bytes of a quantised weight as if they were its numbers
        called = [_called(layer, x) for x in probes]
        agree = all(
            _agree(one, other, _QUANTISED_TOLERANCE) for one, other in zip(after, called, strict=True)
        )
    return merged, agree


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
    held = {adapter for name in layer.adapter_layer_names for adapter in getattr(layer, name)}
    return [adapter for adapter in layer.active_adapters if adapter in held - {*layer.merged_adapters}]


def _float32_copy(layer: nn.Module) -> nn.Module:
    """The layer in float32, dequantised, with its trained tokens if it has any."""
    if isinstance(layer, TrainableTokensWrapper):  # of a head that is tied, below its LoRA
        tokens = layer.token_adapter
        merged = _float32_copy(tokens.get_base_layer())
        if not (tokens.merged or layer.disable_adapters):
            merged.weight = nn.Parameter(tokens.get_merged_weights(tokens.active_adapters).detach().float())
        return merged
    if is_experts(layer):
        return dequantised_copy(layer, torch.float32)
    if not isinstance(layer, nn.Linear):
        return copy.deepcopy(layer).float()
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    for name, weight in own_weights(layer):
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


def _probes(layer: Any, base: nn.Module) -> list[Tensor]:
    """Inputs that show what a layer computes: ids of an embedding, else random vectors."""
    weight = base.weight
    assert isinstance(weight, Tensor)
    if isinstance(base, nn.Embedding):
        last = base.num_embeddings - 1
        ids = {round(last * place / _N_IDS) for place in range(_N_IDS + 1)}
        ids.update(*getattr(layer, "token_indices", {}).values())
        return [torch.tensor(sorted(ids), device=weight.device)[None]]
    size = base.in_features if isinstance(base, nn.Linear) else weight.shape[-1]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, _N_PROBES, size, generator=generator, device="cpu").to(weight.device)]


def _called(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer as it is, with its quantised weight, without dropout."""
    training = {module: module.training for module in layer.modules()}
    dtype = getattr(layer.get_base_layer(), "compute_dtype", None) or x.dtype
    try:
        # bitsandbytes packs weights for inference on a CPU, unless the input needs a gradient
        return layer.eval().forward(x.to(dtype).requires_grad_()).float()
    finally:
        for module, was in training.items():
            module.training = was


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def kind_of(layer: Any) -> str:
    """A tuner as PEFT calls it, with the variants of LoRA."""
    tuner = type(layer).__module__.split(".")[2].upper()  # peft.tuners.ia3.layer
    variants = {
        type(variant).__name__.removesuffix("Variant")
        for variant in getattr(layer, "lora_variant", {}).values()
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


def is_finite(weight: Tensor) -> bool:
    """Whether no number of a weight is infinite or NaN."""
    return not weight.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all())


def _is_plain(layer: nn.Module) -> bool:
    """Whether the weight of a layer is held as the numbers that it stands for."""
    return all(weight.is_floating_point() and weight.element_size() > 1 for weight in layer.parameters())


def own_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
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
        raise InputError(
            f"a linear layer cannot be merged: {why}; load the model anew and merge it before use"
        )
    held = linear.weight
    try:
        return dequantize_module_weight(linear)
    finally:
        linear.weight = held  # of int8 on a CPU, PEFT leaves a weight that cannot be called
