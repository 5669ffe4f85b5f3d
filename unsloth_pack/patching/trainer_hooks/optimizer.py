"""Clip and update the adapter of a patched model as one tensor.

An adapter has hundreds of small weights. One by one they cost Python 4 to 6 ms an update of a 0.5B model, in
which the GPU computes for 16. Trainers have no callback for the norm of the gradients, and make the optimizer
themselves, so three methods of transformers' `Trainer` are replaced. Other models, other optimizers and
sharded weights go through the original methods.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from torch import Tensor
from torch.optim import AdamW
from transformers import TrainingArguments

from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW
from unsloth_pack.modules import sharded_by
from unsloth_pack.patching.trainer_hooks.deferred_logging import is_patched

# The methods of `Trainer`: the original first, then its own arguments.


def create_optimizer(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    is_users_own = trainer.optimizer is not None
    optimizer = original(trainer, *args, **kwargs)
    if not is_users_own:
        optimizer = trainer.optimizer = flattened(trainer, optimizer)
    return optimizer


def clip_grad_norm(original: Callable[..., Any], trainer: Any, model: Any) -> Any:
    norm = _clip_flat(trainer, trainer.args.max_grad_norm)
    return original(trainer, model) if norm is None else norm


def get_grad_norm(original: Callable[..., Any], trainer: Any, model: Any, grad_norm: Any = None) -> Any:
    if grad_norm is None:
        grad_norm = _clip_flat(trainer, inf)  # clips nothing
    return original(trainer, model, grad_norm=grad_norm)


def why_not_flat(arguments: TrainingArguments, model: Any) -> str | None:
    """Say why the optimizer of a run takes the weights one by one, or return None."""
    if not getattr(model, "peft_config", None) or getattr(model, "full_finetuning", False):
        return "all of the model trains, and a second copy of its gradients would take much memory"
    if not is_patched(model):
        return "the model is not patched"
    if arguments.fsdp or arguments.deepspeed:
        return "they are sharded"
    return None if arguments.optim == "adamw_torch_fused" else "not adamw_torch_fused"


def flattened(trainer: Any, optimizer: Any) -> Any:
    """Return a `FlatAdamW` in place of an optimizer, where that computes the same; else the optimizer."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or sharded_by(trainer.model)
    if type(optimizer) is not AdamW or is_sharded or why_not_flat(trainer.args, trainer.model) is not None:
        return optimizer
    return FlatAdamW.in_place_of(optimizer)


def _clip_flat(trainer: Any, max_norm: float) -> Tensor | None:
    """Clip the joined gradient and return its norm; None if the gradients are not joined."""
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    flat = optimizer.flat_weights() if isinstance(optimizer, FlatAdamW) else []
    return trainer.accelerator.clip_grad_norm_(flat, max_norm) if flat else None
