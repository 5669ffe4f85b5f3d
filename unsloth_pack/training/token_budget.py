"""Cut the micro-batches of TRL's `GRPOTrainer` by tokens.

    trainer = GRPOTrainer(...)           # with as many rows a micro-batch as an update has
    limit_tokens(trainer, 16384)         # of which the model computes so many tokens at a time

TRL normalises a loss by the rows or the tokens of its micro-batch. So the micro-batch stays, and its parts
go forward and backward one after another, each with the share that it has in the normaliser.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.modules import sharded_by
from unsloth_pack.packing.planner import plan_packs

# Loss types that are a mean over the rows of a micro-batch, over its tokens, or a sum over the whole update
_BY_ROWS, _BY_TOKENS, _SUMS = ("grpo", "sapo", "dr_grpo", "luspo"), ("bnpo",), ("dapo", "cispo", "vespo")


def limit_tokens(trainer: Any, max_tokens: int) -> None:
    """Let a `GRPOTrainer` compute at most `max_tokens` real tokens at a time, or a single row that has more.

    Loss and gradients stay TRL's own for the whole micro-batch. A metric of a micro-batch becomes the mean
    over its parts.

    Raises:
        InputError: the trainer's loss depends on the rows of a micro-batch together, or weights are sharded.
    """
    require_whole("max_tokens", max_tokens, 1)
    if trainer.loss_type not in _BY_ROWS + _BY_TOKENS + _SUMS:
        raise InputError(f"loss_type is {trainer.loss_type!r}, which cannot be cut; take grpo, dapo or bnpo")
    for what, is_used in (
        ("top_entropy_quantile", trainer.top_entropy_quantile < 1),
        ("the entropy bonus", getattr(trainer, "_entropy_bonus_enabled", False)),
        ("the router's aux loss", getattr(trainer, "aux_loss_enabled", False)),
        ("FSDP or DeepSpeed", trainer.is_deepspeed_enabled or sharded_by(trainer.model) is not None),
    ):
        if is_used:
            raise InputError(f"{what} needs all rows of a micro-batch together; leave out limit_tokens")
    trainer.compute_loss = partial(_compute_loss, trainer, type(trainer).compute_loss, max_tokens)


def _compute_loss(
    trainer: Any, original: Any, max_tokens: int, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Tensor:
    if not model.training:
        loss: Tensor = original(trainer, model, inputs, *args, **kwargs)
        return loss
    *first, last = _cut(trainer, inputs, max_tokens)
    done = torch.zeros((), device=inputs["advantages"].device)
    for part, share in first:
        with trainer.accelerator.no_sync(model):
            loss = original(trainer, model, part, *args, **kwargs) * share
            trainer.accelerator.backward(loss)
        done = done + loss.detach()
    part, share = last
    loss = original(trainer, model, part, *args, **kwargs) * share
    return loss + done  # the trainer goes backward through this part


_Part = tuple[dict[str, Any], Tensor | float]  # of a micro-batch, and its share in the loss


def _cut(trainer: Any, inputs: Mapping[str, Any], max_tokens: int) -> list[_Part]:
    if inputs.get("pixel_values") is not None:
        raise InputError("limit_tokens cuts rows of text, and these have images; leave it out")
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    n_rows, n_tokens = len(mask), mask.sum().clamp(min=1)
    lengths = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).clamp(1, max_tokens)
    longest, order = lengths.sort()
    # The loss gathers a number of each row: in all processes the parts have as many, of about one length
    longest = trainer.accelerator.gather(longest[None]).max(0).values
    of_rows = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.ndim and len(x) == n_rows}
    parts: list[_Part] = []
    for group in plan_packs(longest.cpu().numpy(), max_tokens, "bfd").bins:
        rows = order[list(group)]
        share = dict.fromkeys(_BY_ROWS, len(rows) / n_rows) | dict.fromkeys(
            _BY_TOKENS, mask[rows].sum() / n_tokens
        )
        part = {**inputs, **{name: x[rows] for name, x in of_rows.items()}}
        parts.append((part, share.get(trainer.loss_type, 1.0)))
    return parts
