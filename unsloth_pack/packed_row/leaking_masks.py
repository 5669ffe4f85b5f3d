"""Refuse ready-made attention masks that let documents of a packed row see each other."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_tracing

from unsloth_pack.errors import InputError


def refuse_leaking_masks(masks: Any, position_ids: Any) -> None:
    """Refuse masks by which a token sees one of another document.

    Gemma 3's model without its head builds such masks for images of two documents that stand side by side.

    Args:
        masks: of an ordinary batch: by the type of layer, `[B, 1, T, T]` each; anything else passes.
        position_ids: `[B, T]`, from 0 in each document; anything else passes.

    Raises:
        InputError: names the token that sees too much.
    """
    if not isinstance(masks, dict) or getattr(position_ids, "ndim", 0) != 2 or is_tracing(position_ids):
        return
    if position_ids.shape[1] == 1:
        return
    documents = (position_ids == 0).cumsum(dim=1)
    if int(documents.max()) <= 1:
        return
    is_other = documents[:, :, None] != documents[:, None, :]
    for mask in masks.values():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[2:] != is_other.shape[1:]:
            continue
        sees = mask[:, 0]
        sees = sees & is_other & ~sees.all(dim=-1, keepdim=True)  # rows of padding, which see all or nothing
        if sees.any():
            row, token, other = sees.nonzero()[0].tolist()
            raise InputError(
                f"token {token} of row {row} would see token {other} of another document; call the model "
                "with its head"
            )
