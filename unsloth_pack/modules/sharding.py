"""How weights are sharded over processes.

FSDP2 makes every parameter a `DTensor`, of which a process holds a part. Hooks gather whole parameters around
the forward and backward pass of a group: usually a decoder layer, but any module may be a group of its own.
FSDP1 wraps such modules in one of its own, which does the gathering.
ZeRO-3 gathers around the forward of each module by itself, and leaves its parameters empty elsewhere.
Tensor parallelism makes parameters `DTensor`s too, and never gathers them.
"""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unsloth_pack.modules.walk import Walkable

GATHERED_BY_MODULE = "ZeRO-3 gathers the weights of one module at a time"


def sharded_by(model: Walkable) -> str | None:
    """What leaves this process with a part of the model's weights; None where it holds them all."""
    if any(map(is_gathered_by_module, model.parameters())):
        return "ZeRO-3"
    if any(map(is_gathered_as_group, model.modules())):
        return "FSDP2"
    if any("_fsdp_wrapped_module" in module._modules for module in model.modules()):
        return "FSDP1"
    return "tensor parallelism" if any(isinstance(p, DTensor) for p in model.parameters()) else None


def is_gathered_by_module(parameter: Tensor) -> bool:
    """Whether ZeRO-3 leaves a parameter empty outside the forward of its own module."""
    return hasattr(parameter, "ds_id")


def is_gathered_as_group(module: nn.Module) -> bool:
    """Whether FSDP2 gathers parameters around the forward of this module."""
    return isinstance(module, FSDPModule)


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Whether FSDP shards the parameters of this module, gathered around it or around one that holds it."""
    return hasattr(module, "_is_fsdp_managed_module")


def whole(value: Tensor | float) -> Tensor | float:
    """A tensor of which processes hold parts, gathered; any other value as it is. Every process calls it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
