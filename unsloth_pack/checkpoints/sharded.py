"""A frozen decoder in parts, one a process: loaded layer by layer, gathered when it runs.

    model = load_model(..., sharded=True)    each weight of a layer is a `DTensor`: this process has its rows
    model = get_peft_model(model, ...)       the adapter is whole in every process, as under DDP
    gather_layers(model)                     a layer is whole around its forward and its backward pass

Embeddings, norms, biases and the head stay whole in every process. So do the scales of a quantised weight, a
thirtieth of it: only what bitsandbytes packs is cut, at any byte.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model

from unsloth_pack.checkpoints.names import layer_of
from unsloth_pack.errors import InputError
from unsloth_pack.layers.peer_weights import read_from_peers
from unsloth_pack.modules import is_read_from_peers
from unsloth_pack.patching.patch import patch_of


def make_sharded_class(
    kind: type[PreTrainedModel], finish: Callable[[nn.Module], object]
) -> type[PreTrainedModel]:
    """Return a model class whose `from_pretrained` keeps this process's rows of the layers' weights.

    A process reads these rows alone, if the weights are stored as the model holds them. Otherwise it reads,
    converts and quantises one whole layer at a time; `finish` then gets that layer.
    """

    def load(model: Any, _: object, paths: list[str], config: Any, expected_keys: object = None) -> Any:
        mesh = _make_mesh(next(iter((config.device_map or {"": "cpu"}).values())))
        waiting = [*model.get_decoder().layers]
        converts = any(isinstance(each, WeightConverter) for each in config.weight_mapping or ())
        is_packed = any(not weight.is_floating_point() for weight in model.parameters())
        if not (config.is_quantized or converts or is_packed):
            for module, name, weight in _list_matrices(waiting):
                module._parameters[name] = _cut_rows(weight, mesh)
        total: Any = None
        with ExitStack() as files:
            stored: dict[str, object] = {}
            for path in paths:
                file = files.enter_context(safe_open(path, "pt"))
                stored |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for _, names in groupby(sorted(stored, key=layer_of), key=layer_of):
                part, _ = convert_and_load_state_dict_in_model(model, {n: stored[n] for n in names}, config)
                total = part if total is None else _join_reports(total, part)
                for layer in [each for each in waiting if not any(p.is_meta for p in each.parameters())]:
                    waiting.remove(layer)
                    finish(layer)
                    for module, name, weight in _list_matrices([layer]):
                        module._parameters[name] = _cut_rows(weight, mesh)
                    for module in layer.modules():  # transformers would look at quantised weights again
                        vars(module)["_is_hf_initialized"] = not module._buffers
        return total, None

    methods = {"_load_pretrained_model": staticmethod(load), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), methods)


def _make_mesh(device: Any) -> DeviceMesh:
    if not dist.is_initialized():
        raise InputError(
            "sharded=True needs a group of processes; start with torchrun and init_process_group"
        )
    return init_device_mesh(torch.device(device).type, (dist.get_world_size(),))


def _list_matrices(layers: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """List the matrices of layers that are whole, with the modules that hold them."""
    for layer in layers:
        for module in layer.modules():
            for name, weight in [*module._parameters.items()]:
                if weight is not None and weight.dim() > 1 and not isinstance(weight, DTensor):
                    yield module, name, weight


def _cut_rows(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Copy this process's rows of a weight, as FSDP2 cuts it."""
    whole = weight.detach().as_subclass(torch.Tensor)  # bitsandbytes has classes of its own
    chunks = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    own = chunks[rank].clone() if rank < len(chunks) else whole[:0]
    shape, stride = whole.shape, whole.stride()
    rows = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    parameter = nn.Parameter(rows, requires_grad=False)
    vars(parameter).update(vars(weight), _is_hf_initialized=True)  # how bitsandbytes quantised it, too
    return parameter


def _join_reports(one: Any, other: Any) -> Any:
    """Join what transformers reports of two loads into one model."""
    one.missing_keys &= other.missing_keys
    one.unexpected_keys |= other.unexpected_keys
    one.mismatched_keys |= other.mismatched_keys
    one.conversion_errors |= other.conversion_errors
    return one


def is_cut(model: nn.Module) -> bool:
    """True for a model of `make_sharded_class` whose layers are not gathered yet."""
    has_rows = any(isinstance(weight, DTensor) for weight in model.parameters())
    is_gathered = is_read_from_peers(model) or any(isinstance(each, FSDPModule) for each in model.modules())
    return has_rows and not is_gathered


def make_whole(model: nn.Module, ends: Collection[str]) -> None:
    """Gather the weights of modules whose paths end so, for PEFT to copy and train."""
    for path, module in model.named_modules():
        for name, weight in module._parameters.items() if path.endswith(tuple(ends)) else ():
            if isinstance(weight, DTensor):
                module._parameters[name] = nn.Parameter(weight.full_tensor(), requires_grad=False)


def gather_layers(model: Any) -> None:
    """Gather each layer around its passes: from the memory of this machine's processes, or through FSDP2.

    What trains is whole: DDP averages its gradients.
    """
    decoder = model.get_decoder()
    names = [name for name, weight in model.named_parameters() if isinstance(weight, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    if (peer_weights := read_from_peers(decoder.layers)) is not None:
        vars(decoder)["peer_weights"] = peer_weights
    else:
        _gather_by_fsdp2(model, decoder)


def _gather_by_fsdp2(model: Any, decoder: Any) -> None:
    mesh = next(weight.device_mesh for weight in decoder.parameters() if isinstance(weight, DTensor))
    for layer in decoder.layers:
        cut = [
            (module, name, weight)
            for module in layer.modules()
            for name, weight in module._parameters.items()
            if isinstance(weight, DTensor)
        ]
        for module, name, weight in cut:
            empty = torch.empty(weight.shape, device="meta")  # torch 2.11 refuses integers here
            module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        whole = {weight for weight in layer.parameters() if not weight.is_meta}
        fully_shard(layer, mesh=mesh, ignored_params=whole)
        for module, name, weight in cut:
            module._parameters[name] = weight
    whole = {weight for weight in decoder.parameters() if not isinstance(weight, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # the root, whose streams the layers share
    if (patch := patch_of(model)) is not None:
        patch.adapt_to_sharding("FSDP2")


def free_gathered(model: nn.Module) -> None:
    """Free layers that are whole after a forward pass alone, where FSDP2 holds them for a backward pass.

    A `state_dict()`, which the main process alone calls at a save, would free them there alone: the next pass
    would gather in one process and not in the others.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
