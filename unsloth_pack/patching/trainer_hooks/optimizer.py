"""Trainers clip and update the adapter of a patched model as one tensor.

An adapter has hundreds of small weights. One by one they cost Python 4 to 6 ms an update of a 0.5B model, in
which the GPU computes for 16. Trainers have no hook for the norm of the gradients, and make the optimizer by
themselves. So `create_optimizer`, `_clip_grad_norm` and `_get_grad_norm` of transformers' `Trainer` are
wrapped, once for all trainers. Other models, optimizers and sharded weights go through its own functions.
"""

from functools import wraps
from math import inf
from typing import Any

from torch import Tensor
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments

from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW
from unsloth_pack.modules.sharding import sharded_by
from unsloth_pack.patching.trainer_hooks.deferred_logging import is_patched

_WRAPPED = "unsloth_pack_flat_updates"


def update_flat(trainer_class: type[Trainer] = Trainer) -> None:
    """Wrap a trainer's methods, if that has not been done."""
    if vars(trainer_class).get(_WRAPPED):
        return
    theirs: Any = trainer_class
    create, clip, norm_of = theirs.create_optimizer, theirs._clip_grad_norm, theirs._get_grad_norm

    @wraps(create)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_given = self.optimizer is not None
        made = create(self, *args, **kwargs)
        if not is_given:
            made = self.optimizer = flattened(self, made)
        return made

    @wraps(clip)
    def clip_grad_norm(self: Any, model: Any) -> Any:
        norm = clipped_flat(self, self.args.max_grad_norm)
        return clip(self, model) if norm is None else norm

    @wraps(norm_of)
    def get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = clipped_flat(self, inf)  # nothing is clipped
        return norm_of(self, model, grad_norm=grad_norm)

    theirs.create_optimizer, theirs._clip_grad_norm = create_optimizer, clip_grad_norm
    theirs._get_grad_norm = get_grad_norm
    setattr(trainer_class, _WRAPPED, True)


def why_not_flat(arguments: TrainingArguments, model: Any) -> str | None:
    """Why the optimizer of a run takes the weights one by one, or None."""
    if not getattr(model, "peft_config", None) or getattr(model, "full_finetuning", False):
        return "all of the model trains, and a second copy of its gradients would take much memory"
    if not is_patched(model):
        return "the model is not patched"
    if arguments.fsdp or arguments.deepspeed:
        return "they are sharded"
    return None if arguments.optim == "adamw_torch_fused" else "not adamw_torch_fused"


def flattened(trainer: Any, optimizer: Any) -> Any:
    """The optimizer, as one over a single tensor where that computes the same."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or sharded_by(trainer.model)
    if type(optimizer) is not AdamW or is_sharded or why_not_flat(trainer.args, trainer.model) is not None:
        return optimizer
    return FlatAdamW.in_place_of(optimizer)


def clipped_flat(trainer: Any, most: float) -> Tensor | None:
    """The norm of the gradients, which is at most `most` then; None if they do not lie in one tensor."""
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    flat = optimizer.flat_weights() if isinstance(optimizer, FlatAdamW) else []
    return trainer.accelerator.clip_grad_norm_(flat, most) if flat else None
