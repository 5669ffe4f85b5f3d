"""A model's weights with its adapters merged: equal to what the model computes, or refused in one line."""

import copy
import gc
import hashlib
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
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

# One layer with its adapters merged. PEFT merges a float32 copy, whose outputs must stay the same.

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
    wrappers = [*_tuner_layers(copied)]
    for wrapper in wrappers:
        _expect_float_base(wrapper)
    # A stack of experts is no function of one tensor; PEFT's forward adds to it what its merge adds.
    probes = [] if isinstance(layer, ParamWrapper) else [_probe(layer, base)]
    before = [copied(x) for x in probes]
    for wrapper in reversed(wrappers):  # from the inside
        wrapper.merge()
    merged = copied.get_base_layer()
    if not all(map(is_finite, merged.parameters())):
        return merged, True  # refused by the name of the weight
    after = [merged(x) for x in probes]
    agrees = all(map(partial(_agree, tolerance=_TOLERANCE), after, before))
    if agrees and not all(map(_holds_numbers, base.parameters())):
        # Some tuners read the bytes of a quantised weight as if they were its numbers
        called = [_called(layer, x) for x in probes]
        agrees = all(map(partial(_agree, tolerance=_QUANTISED_TOLERANCE), after, called))
    return merged, agrees


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
    return torch.randn(1, _N_PROBES, size, generator=generator, device="cpu").to(weight.device)


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


def _holds_numbers(weight: Tensor) -> bool:
    """Whether a weight is stored as its numbers, and not quantised."""
    return weight.is_floating_point() and weight.element_size() > 1


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
    weight = linear.weight
    try:
        return dequantize_module_weight(linear)
    finally:
        linear.weight = weight  # of int8 on a CPU, PEFT leaves a weight that cannot be called


# Merge a large layer in blocks of rows.
#
# A merge in float32 holds up to five times what is saved of a layer. An embedding or a head may be most of a
# model, so this would be more than the model itself.

LARGE = 8192  # rows; layers with fewer are merged as a whole
_N_BLOCKS = 64


def _base_and_tokens(layer: Any) -> tuple[nn.Module, TrainableTokensLayer | None]:
    """The layer below a tuner layer, and the trained tokens that it is, or that lie below its LoRA."""
    base = layer.get_base_layer()
    if isinstance(base, TrainableTokensWrapper):  # of a tied head
        return base.token_adapter.get_base_layer(), base.token_adapter
    return base, layer if isinstance(layer, TrainableTokensLayer) else None


def _goes_by_rows(layer: Any) -> bool:
    """Whether a tuner layer is large, and each row of its merged weight depends on that row alone."""
    base, tokens = _base_and_tokens(layer)
    inner = tokens or layer
    if inner.base_layer is not base or not isinstance(base, nn.Linear | nn.Embedding):
        return False
    names = {name for name, _ in base.named_parameters()}
    if not names <= {"weight", "bias"} or base.state_dict().keys() != names:
        return False
    is_known = isinstance(layer, LoraLinear | LoraEmbedding) and not (
        layer.lora_variant or any(layer.lora_bias.values()) or getattr(layer, "fan_in_fan_out", False)
    )
    return (
        (len(base.weight) > LARGE and _holds_numbers(base.weight) and not base.weight.is_meta)
        and not any(each.merged or each.disable_adapters for each in (layer, inner))
        and (tokens is None or len(tokens.active_adapters) == 1)
        and (layer is tokens or is_known)
    )


def _blocks_of(layer: Any) -> Iterator[tuple[slice, nn.Module]]:
    """Rows, and a layer of these alone: a tuner layer still to be merged, or one without an adapter."""
    base, tokens = _base_and_tokens(layer)
    assert isinstance(base.weight, Tensor)
    n_rows = len(base.weight)
    step = -(-n_rows // _N_BLOCKS)
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        block = _rows_of(base, rows)
        if tokens is not None:
            _put_tokens(block, tokens, rows)
        yield rows, block if layer is tokens else _adapted(layer, block, rows)


def _rows_of(base: nn.Module, rows: slice) -> nn.Module:
    """A plain layer whose weights are views of some rows."""
    weight: Any = base.weight
    n_rows, n_columns = weight[rows].shape
    if isinstance(base, nn.Embedding):
        block: Any = nn.Embedding(n_rows, n_columns, device="meta")
    else:
        block = nn.Linear(n_columns, n_rows, getattr(base, "bias", None) is not None, device="meta")
    for name, weight in base.named_parameters():
        block.register_parameter(name, nn.Parameter(weight.detach()[rows]))
    return block


def _put_tokens(block: Any, tokens: Any, rows: slice) -> None:
    """Replace rows of a block by those of trained tokens."""
    (adapter,) = tokens.active_adapters
    places = torch.tensor(tokens.token_indices[adapter])
    is_here = (places >= rows.start) & (places < rows.stop)
    weight = block.weight.detach().clone()
    trained = tokens.trainable_tokens_delta[adapter].detach()[is_here.to(weight.device)].to(weight)
    weight[(places[is_here] - rows.start).to(weight.device)] = trained
    block.weight = nn.Parameter(weight)


def _adapted(layer: Any, base: nn.Module, rows: slice) -> nn.Module:
    """The tuner layer over some rows of its base layer."""
    kind = LoraEmbedding if isinstance(layer, LoraEmbedding) else LoraLinear
    block: Any = kind.__new__(kind)
    block.__dict__ = {**layer.__dict__, "_modules": {**layer._modules, "base_layer": base}}
    if kind is LoraEmbedding:
        factors = {name: nn.Parameter(a.detach()[:, rows]) for name, a in layer.lora_embedding_A.items()}
        block._modules["lora_embedding_A"] = nn.ParameterDict(factors)
    else:
        block._modules["lora_B"] = nn.ModuleDict({n: _rows_of(b, rows) for n, b in layer.lora_B.items()})
    return block


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
    digests = []
    for module, path in zip(modules, paths, strict=True):  # no two weights are held at once
        digest = hashlib.blake2b()
        for _, weight in _Merging(model, dtype).visit(module, path):
            digest.update(weight.flatten().view(torch.uint8).numpy().data)
            del weight
        digests.append(digest.digest())
    return digests[0] == digests[1]


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model that PEFT wraps, or the model itself."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return base


class _Merging:
    """Walks over a model and gives its merged weights in `dtype`, one after the other."""

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
        elif isinstance(module, BaseTunerLayer) and _goes_by_rows(module):
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
        weights = {
            name: torch.empty(weight.shape, dtype=self._dtype, device="cpu")
            for name, weight in own_weights(_base_and_tokens(layer)[0])
        }
        for rows, block in _blocks_of(layer):
            is_adapted = isinstance(block, BaseTunerLayer)
            merged = merged_layer(block, path, self._parameters) if is_adapted else block
            for name, weight in merged.named_parameters():
                weights[name][rows] = weight.detach()
            del merged, weight, block
        for name in [*weights]:
            yield self._stored(f"{path}.{name}", weights.pop(name))

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
    whole = [one for one in alive if "_modules" in vars(one)]  # an error may hold one that was refused
    return [one for one in whole if any(module is base for module in one.modules())]


def _of_another_model(name: str, shape: object, expected: Tensor | None) -> InputError:
    """A weight that a new model of this configuration lacks, has in another shape, or has alone."""
    wanted = "missing" if expected is None else tuple(expected.shape)
    return InputError(
        f"weight {name} is {shape}, and not {wanted} as in a new model of this configuration; {REMEDY}"
    )
