"""Look at modules: walks that take little time, patterns over paths, hooks, sharded weights."""

import logging
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unsloth_pack.errors import InputError, written

logger = logging.getLogger("unsloth_pack")
_RECORDER_MODULE = "transformers.utils.output_capturing"
_MARKS_INPUTS = "enable_input_require_grads.<locals>.make_inputs_require_grads"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GATHERED_BY_MODULE = "ZeRO-3 gathers the weights of one module at a time"
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Walkable(Protocol):
    """Has modules and parameters, as every `torch.nn.Module`."""

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


def base_of(model: object) -> Any:
    """Return the transformers model that PEFT wraps, or the model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def list_modules(root: nn.Module) -> list[nn.Module]:
    """List what `root.modules()` yields in a sixth of its time; a module at two paths comes twice."""
    modules = [root]

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is not None:
                modules.append(child)
                if child._modules:
                    visit(child)

    visit(root)
    return modules


class QuickWalks(nn.Module):
    """A module whose `train` and `parameters` are quick: transformers' `Trainer` walks so in every step.

    Over the two thousand modules of a small model with adapters, torch's own walks take a sixth of a captured
    step.
    """

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As `torch.nn.Module.parameters`."""
        if not recurse:
            return super().parameters(recurse)
        each = [p for module in list_modules(self) for p in module._parameters.values() if p is not None]
        return iter(dict(zip(map(id, each), each, strict=True)).values())

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`; does nothing if all modules are in this mode already."""
        modes = {*map(attrgetter("training"), list_modules(self))}
        return self if modes == {mode} else super().train(mode)


@contextmanager
def attribute_set(modules: Iterable[nn.Module], name: str, value: object) -> Iterator[None]:
    """Set an attribute of modules inside this context, ten times as fast as through `nn.Module`."""
    before = [(vars(module), getattr(module, name)) for module in modules]
    try:
        for attributes, _ in before:
            attributes[name] = value
        yield
    finally:
        for attributes, old in before:
            attributes[name] = old


def evaluation_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put all modules in evaluation mode inside a context."""
    return attribute_set((module for module in list_modules(model) if module.training), "training", False)


def compile_patterns(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate on paths: a pattern matches whole parts of a path, or those of a parent.

    `model.layers.[01]` matches these two layers and everything inside, `norm` every module of that name.
    """
    compiled = [re.compile(rf"(?:.*\.)?(?:{pattern})(?:\..*)?") for pattern in patterns]
    return lambda path: any(pattern.fullmatch(path) for pattern in compiled)


def check_matches(option: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Raise InputError for a pattern of `option` that matches no path; name a few modules of the model."""
    known = [*paths]
    for pattern in patterns:
        if not any(map(compile_patterns([pattern]), known)):
            examples = ", ".join(dict.fromkeys(path.rpartition(".")[0] for path in known[:3]))
            raise InputError(
                f"{option} holds {pattern!r}, which matches no module that has weights; give a regular "
                f"expression, or a JSON list of several (the model has {examples}, ...)"
            )


def chosen_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """List the paths of the matching modules with parameters of their own."""
    is_chosen = compile_patterns(patterns)
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if is_chosen(path) and any(True for _ in module.parameters(recurse=False))
    ]


def train_only(model: nn.Module, train: Sequence[str] | None, freeze: Sequence[str] | None) -> None:
    """Train the parameters that `train` matches, or all if None, except those that `freeze` matches.

    Raises:
        InputError: nothing is left to train.
    """
    is_trained = compile_patterns(train or [".*"])
    is_frozen = compile_patterns(freeze or ())
    parameters = [*model.named_parameters(remove_duplicate=False)]
    trained = {id(parameter) for path, parameter in parameters if is_trained(path)}
    trained -= {id(parameter) for path, parameter in parameters if is_frozen(path)}
    for _, parameter in parameters:
        parameter.requires_grad_(id(parameter) in trained)
    if not trained:
        options = f"train_modules is {written(train)} and freeze_modules is {written(freeze)}"
        raise InputError(f"{options}, which leaves nothing to train; freeze less")


def own_names(module: nn.Module) -> set[str]:
    """Return the names of a module's own parameters, buffers, submodules and public attributes."""
    attributes = {name for name in vars(module) if not name.startswith("_") and name != "training"}
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return attributes | {name for name, _ in (*tensors, *module.named_children())}


def require_model(model: object, remedy: str = "give a transformers model, or a PEFT model of one") -> None:
    """Raise InputError, with a remedy, unless `model` is a module: not None, a name, a config or a class."""
    if not isinstance(model, nn.Module):
        shown = " ".join(reprlib.repr(model).split())  # a config has many lines
        raise InputError(f"model is {shown}; {remedy}")


# Hooks. Code that bypasses `module()` skips its hooks, and has to check here first.


def is_harmless(hook: object) -> bool:
    """True if a hook changes no result: it records outputs, or makes embeddings require gradients.

    transformers adds recorders to every layer at the first request for outputs, and leaves them there.
    """
    is_recorder = getattr(hook, "__module__", None) == _RECORDER_MODULE
    return is_recorder or getattr(hook, "__qualname__", "").endswith(_MARKS_INPUTS)


def has_hooks(*modules: nn.Module) -> bool:
    """True if a module has hooks, or a forward of its own, such as accelerate's offloading."""
    for m in modules:  # unrolled: this runs for every layer at every step
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
        if "forward" in m.__dict__:
            return True
    return False


def has_peft_hooks(root: nn.Module) -> bool:
    """True if PEFT has hooks: they give each row of a batch its own adapter or task, or measure rows."""
    for module in list_modules(root):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():
                function = hook.func if isinstance(hook, partial) else hook
                if getattr(function, "__module__", "").startswith("peft."):
                    return True
    return False


def no_compile(forward: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorate a forward to run outside `torch.compile`.

    The compiler cannot trace the host's description of a packed row, and gains nothing from fused kernels and
    captured steps.
    """

    @wraps(forward)
    def enter(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            eager: Callable[_Args, _Result] = torch.compiler.disable(run)  # only now: it imports the compiler
            return eager(*args, **kwargs)
        return forward(*args, **kwargs)

    def run(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        _warn_once()
        return forward(*args, **kwargs)

    return enter


@cache
def _warn_once() -> None:
    logger.warning("torch.compile leaves a patched model as it is: its kernels are fused already")


# Sharding. FSDP2 turns every parameter into a `DTensor`, which hooks gather around the passes of a group of
# modules, usually a decoder layer. `layers.peer_weights` has `DTensor`s, too, while a layer does not run.
# FSDP1 wraps such modules in one that gathers. ZeRO-3 gathers around the forward of each module, and leaves
# its parameters empty otherwise. Tensor parallelism has `DTensor`s too, and never gathers them.


def sharded_by(model: Walkable) -> str | None:
    """Return how the weights are sharded (FSDP2, FSDP1, ZeRO-3, tensor parallelism), or None.

    None too if layers are read from the memory of other processes: these need not run the same passes.
    """
    if is_read_from_peers(model):
        return None
    if any(map(is_gathered_by_module, model.parameters())):
        return "ZeRO-3"
    if any(map(is_gathered_as_group, model.modules())):
        return "FSDP2"
    if any("_fsdp_wrapped_module" in module._modules for module in model.modules()):
        return "FSDP1"
    return "tensor parallelism" if any(isinstance(p, DTensor) for p in model.parameters()) else None


def is_read_from_peers(model: Walkable) -> bool:
    """True if this process reads the weights of layers from the memory of others, see `PeerWeights`."""
    return any("peer_weights" in vars(module) for module in model.modules())


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
