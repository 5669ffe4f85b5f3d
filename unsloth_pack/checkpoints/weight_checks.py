"""What is wrong with how a model is to be loaded or adapted, known before its weights are read."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from peft import LoftQConfig
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import is_bitsandbytes_available

from unsloth_pack.errors import InputError, require_whole


def check_positions(max_seq_length: int, model_name: str, text_config: Any) -> None:
    """Refuse rows that are longer than the model has positions.

    Raises:
        InputError: `max_seq_length` is above `max_position_embeddings`.
    """
    if max_seq_length > text_config.max_position_embeddings:
        raise InputError(
            f"max_seq_length is {max_seq_length}, {model_name} has {text_config.max_position_embeddings} "
            "positions; lower it, or give from_pretrained max_position_embeddings and rope_parameters",
            about="max_seq_length",
        )


def check_loftq(loftq_config: Mapping[str, Any]) -> None:
    """Refuse arguments that are not LoftQ's, and LoftQ where PEFT cannot compute it.

    Raises:
        InputError: an argument is unknown, or there is no CUDA device.
    """
    known = [each.name for each in fields(LoftQConfig)]
    if unknown := [name for name in loftq_config if name not in known]:
        raise InputError(
            f"loftq_config has {unknown[0]!r}, which LoftQ does not take; give {', '.join(known)}",
            about=f"loftq_config.{unknown[0]}",
        )
    if not torch.cuda.is_available():
        given = json.dumps(dict(loftq_config))
        raise InputError(
            f"loftq_config is {given}, but PEFT computes LoftQ on CUDA only; leave it out",
            about="loftq_config",
        )


def check_loading(
    max_seq_length: int, in_4bit: bool, in_8bit: bool, in_fp8: bool, full: bool = False
) -> None:
    """Refuse a row length below 1, and forms of weights that contradict each other or cannot run here.

    Raises:
        InputError: names the argument, its value and the remedy.
    """
    require_whole("max_seq_length", max_seq_length, 1)
    given = [
        f"load_in_{kind}" for kind, asked in (("4bit", in_4bit), ("8bit", in_8bit), ("fp8", in_fp8)) if asked
    ]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are set together; choose one", about=given)
    if full and given:
        raise InputError(f"full_finetuning=True cannot train quantised weights; drop {given[0]}", about=given)
    if in_fp8 and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        raise InputError(
            f"load_in_fp8=True needs a GPU of compute capability 8.9 or more, this is {where}; use bfloat16, "
            "load_in_8bit or load_in_4bit",
            about="load_in_fp8",
        )
    if (in_4bit or in_8bit) and not is_bitsandbytes_available():
        raise InputError(
            f"{given[0]}=True needs bitsandbytes, which is not installed; pip install 'unsloth-pack[cuda]'",
            about=given,
        )


# Refuse weights of a model or an adapter, by their files and once they are loaded.


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
