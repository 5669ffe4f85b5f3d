"""Train on several processes: DeepSpeed, and DDP with the gradients in one tensor.

ZeRO-3 gathers parameters at each module by itself, and leaves them without elements otherwise. ZeRO-2 shards
gradients and the optimizer's state only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW, FlatLayout, join
from unsloth_pack.errors import InputError


def gather_trained(trainer: Trainer) -> dict[str, Tensor] | None:
    """Gather the parameters that DeepSpeed trains on the main process's CPU; None without it.

    Every process has to call this.
    """
    if not trainer.is_deepspeed_enabled:
        return None
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    from deepspeed.utils import safe_get_full_fp32_param

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in trained.items()}


@contextmanager
def loaded_whole(arguments: TrainingArguments) -> Iterator[None]:
    """Load a model whole inside this context, under ZeRO-3 too, for the checks of its weights and the probe
    for leaks. transformers would shard it while it loads; the trainer shards it later."""
    settings = getattr(arguments, "hf_deepspeed_config", None)  # where DeepSpeed trains
    if settings is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(settings)


# Of gradients. Not measured: models whose steps are captured have smaller adapters, as a rule
_MOST_BYTES = 128 * 2**20


class AveragedGradients:
    """Takes the exchange of a small adapter's gradients over from DDP, if the optimizer is a `FlatAdamW`.

    DDP copies each gradient into a bucket, exchanges full buckets during the backward pass, and copies the
    gradients back. Those of an adapter are hundreds of small tensors, and a captured step makes all of them
    at once, so that nothing hides the copies. They lie in one tensor, which is exchanged as it is. A large
    adapter stays with DDP: over a slow link its exchange takes longer than the copies, and is better hidden.
    """

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None  # of the micro-batch before
        self._flat: FlatAdamW | None = None  # the same, if the exchange is taken over

    def begin(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Have DDP, if it is the model, leave the gradients of a micro-batch alone, as under `no_sync`."""
        inner = getattr(optimizer, "optimizer", optimizer)
        if inner is not self._optimizer:
            self._optimizer, self._flat = inner, None
            if isinstance(inner, FlatAdamW) and isinstance(model, DistributedDataParallel):
                weights = [p for group in inner.param_groups for p in group["params"]]
                is_small = sum(p.numel() * p.element_size() for p in weights) <= _MOST_BYTES
                self._flat = inner if is_small else None
        if self._flat is not None:
            vars(model)["require_backward_grad_sync"] = False

    def average(self) -> None:
        """Give every process the mean of all processes' gradients; before they are clipped. InputError if a
        weight got no gradient in this process."""
        flat = self._flat
        if flat is None:
            return
        if weights := flat.flat_weights():
            for weight in weights:
                _average(weight.grad)
            return
        if n_missing := sum(p.grad is None for group in flat.param_groups for p in group["params"]):
            raise InputError(
                f"{n_missing} trained weights got no gradient in this process, and the others wait for "
                "theirs; train them in one process, or freeze them"
            )
        for group in flat.param_groups:
            for dtype in dict.fromkeys(p.dtype for p in group["params"]):
                _average_apart([p.grad for p in group["params"] if p.dtype == dtype])


def _average_apart(gradients: Sequence[Tensor]) -> None:
    """Average gradients that are not one tensor here, in the order in which they may be one in others."""
    layout = FlatLayout([gradient.shape for gradient in gradients])
    ordered = [gradients[place] for place in layout.order]
    together = join(ordered)
    _average(together)
    for gradient, part in zip(ordered, layout.cut(together), strict=True):
        gradient.copy_(part)


@torch.no_grad()
def _average(gradients: Tensor | None) -> None:
    """Divide before the sum, as DDP does: in 16 bits the sum may be too large."""
    assert gradients is not None
    gradients.div_(dist.get_world_size())
    dist.all_reduce(gradients)
