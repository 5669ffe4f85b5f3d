"""Detect how weights are sharded over processes.

FSDP2 turns every parameter into a `DTensor`. Hooks gather whole parameters around the forward and backward
pass of
a group: usually a decoder layer, but any module may be a group. FSDP1 wraps such modules in one that gathers.
ZeRO-3 gathers around the forward of each module, and leaves its parameters empty otherwise. Tensor
parallelism has `DTensor`s too, and never gathers them.
"""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unsloth_pack.modules.walk import Walkable

GATHERED_BY_MODULE = "ZeRO-3 gathers the weights of one module at a time"


def sharded_by(model: Walkable) -> str | None:
    """Return how the weights are sharded (FSDP2, FSDP1, ZeRO-3, tensor parallelism), or None."""
    if any(map(is_gathered_by_module, model.parameters())):
        return "ZeRO-3"
    if any(map(is_gathered_as_group, model.modules())):
        return "FSDP2"
    if any("_fsdp_wrapped_module" in module._modules for module in model.modules()):
        return "FSDP1"
    return "tensor parallelism" if any(isinstance(p, DTensor) for p in model.parameters()) else None


def is_gathered_by_module(parameter: Tensor) -> bool:
    """True if ZeRO-3 leaves a parameter empty outside the forward of its module."""
    return hasattr(parameter, "ds_id")


def is_gathered_as_group(module: nn.Module) -> bool:
    """True if FSDP2 gathers parameters around the forward of this module."""
    return isinstance(module, FSDPModule)


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """True if FSDP shards the parameters of this module, gathered around it or around a parent."""
    return hasattr(module, "_is_fsdp_managed_module")


def whole(value: Tensor | float) -> Tensor | float:
    """Gather a sharded tensor, in every process; return any other value as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value
