"""What is refused of the weights of a model or an adapter: by their files, and once they are loaded."""

import os

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from unsloth_pack.errors import InputError


def check_files(folder: str, what: str, use_safetensors: bool) -> None:
    """Refuse weights in files that are cut, or that can run code when they are read."""
    if not use_safetensors:
        return
    names = sorted(os.listdir(folder))
    weights = [os.path.join(folder, name) for name in names if name.endswith(".safetensors")]
    for path in weights:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not whole safetensors ({error}); download or save it again") from None
    if not weights and any(name.endswith(".bin") for name in names):
        raise InputError(
            f"{folder} holds only pickled weights, which can run code when loaded; save the {what} as "
            "safetensors, or pass use_safetensors=False if you trust it"
        )
    if not weights:
        raise InputError(f"{folder} holds no safetensors; download or save the {what} again")


def refuse_not_finite(model: nn.Module, complaint: str) -> None:
    """Refuse weights that hold an infinity or a NaN.

    Args:
        complaint: begins the error.
    """
    for name, weight in model.named_parameters():
        if (
            not weight.is_floating_point()
            or weight.element_size() == 1
            or weight.is_meta
            or not weight.numel()
        ):
            continue
        if not torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all():
            raise InputError(
                f"{complaint}: weight {name} is not finite as {weight.dtype}; choose another dtype, or "
                "download the weights again"
            )
