"""Run a model without its adapter, or as it was earlier: a teacher or reference of the same weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from unsloth_pack.modules import attribute_set, list_modules

_OFF = "_disable_adapters"  # PEFT's flag of a layer; `enable_adapters` sets it and freezes weights as well
_OF_AN_ADAPTER = ("lora_", "modules_to_save", "trainable_tokens_")  # parts of the names of its weights


def base_model(model: nn.Module) -> AbstractContextManager[None]:
    """Leave out a model's adapters, trained tokens and trained copies of modules, inside a context.

    Without gradients, fused layers stay fused: their outputs are bit for bit those of adapters whose B is 0.
    PEFT's `disable_adapter` also walks over all weights, which takes 28 ms for 168 layers.
    """
    return attribute_set(_list_adapted(model), _OFF, True)


def _list_adapted(model: nn.Module) -> list[nn.Module]:
    modules = list_modules(model)  # checked by class: every module by itself would take a millisecond
    adapted = {k for k in {*map(type, modules)} if issubclass(k, BaseTunerLayer | AuxiliaryTrainingWrapper)}
    return [module for module in modules if type(module) in adapted]


def is_always_the_same(module: nn.Module) -> bool:
    """True if no weight of a module trains, and `base_model` leaves nothing out."""
    return not (any(weight.requires_grad for weight in module.parameters()) or _list_adapted(module))


def name_trained_in_place(model: nn.Module) -> str | None:
    """Return the name of a weight that trains and that `base_model` cannot leave out, or None."""
    trained = (name for name, weight in model.named_parameters() if weight.requires_grad)
    return next((name for name in trained if not any(part in name for part in _OF_AN_ADAPTER)), None)


class FrozenCopy:
    """A copy of the weights of a model that train, as they are now."""

    def __init__(self, model: nn.Module):
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        copies = {weight: nn.Parameter(weight.detach().clone(), requires_grad=False) for weight in trained}
        # The place of each: the dict of its module, and its name there
        self._places = [
            (module._parameters, name, copies[weight])
            for module in model.modules()
            for name, weight in module._parameters.items()
            if weight in copies
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the model with the copies in place of its weights, inside this context."""
        trained = [weights[name] for weights, name, _ in self._places]
        try:
            for weights, name, copied in self._places:
                weights[name] = copied
            yield
        finally:
            for (weights, name, _), weight in zip(self._places, trained, strict=True):
                weights[name] = weight
