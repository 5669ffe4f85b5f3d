"""What a module is made of, by name."""

from torch import nn


def own_names(module: nn.Module) -> set[str]:
    """The names of a module's own parameters, buffers, submodules and public attributes."""
    attributes = {name for name in vars(module) if not name.startswith("_") and name != "training"}
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return attributes | {name for name, _ in (*tensors, *module.named_children())}
