"""What TRL logs of every micro-batch, read from the device when it is logged.

TRL's `compute_loss` reads entropy, accuracy and tokens on the host after each forward pass, so that the
device runs out of work before the backward pass is launched. The function computes the loss too, and has no
hook between the two. So TRL's default loss is computed here. Any other goes through TRL's function.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import SFTTrainer


def has_default_loss(trainer: SFTTrainer) -> bool:
    """Whether TRL would compute the loss as `default_loss` does."""
    arguments: Any = trainer.args
    return (
        arguments.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and trainer.accelerator.parallelism_config is None
    )


def default_loss(
    trainer: SFTTrainer, model: Any, inputs: dict[str, Any], num_items: Tensor | int | None
) -> tuple[Tensor, Any]:
    """TRL's loss of a micro-batch, and the model's output.

    Args:
        num_items: labels of the update, in all processes; None to divide by those of this micro-batch.
    """
    asked = {"use_cache": False, "fused_lm_head": True}
    if trainer.aux_loss_enabled:  # of routed experts
        asked["output_router_logits"] = True
    outputs = model(**inputs | asked)
    divisor = outputs.label_mask.sum() if num_items is None else torch.as_tensor(num_items)
    loss = (-outputs.log_probs).sum() / divisor.clamp(min=1)
    if num_items is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.accelerator.num_processes
    if trainer.aux_loss_enabled:
        n_steps = 1 if num_items is None else trainer.current_gradient_accumulation_steps
        loss = loss + trainer.router_aux_loss_coef * outputs.aux_loss / n_steps
    return loss, outputs


class LateMetrics:
    """The sums behind TRL's metrics, on the device until somebody reads them."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._noted: dict[str, list[tuple[Tensor, int | None]]] = {"train": [], "eval": []}

    def note(self, mode: str, outputs: Any) -> None:
        """Keep the sums of a micro-batch.

        Args:
            mode: "train" or "eval", which are logged apart.
            outputs: of the model, to `fused_lm_head=True`.
        """
        sums = [outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()]
        if outputs.aux_loss is not None:  # of routed experts, where it is part of the loss
            sums.append(outputs.aux_loss.detach())
        # float64 holds every count and every float32
        self._noted[mode].append((torch.stack([x.double() for x in sums]), self._ranks_that_count()))

    def _ranks_that_count(self) -> int | None:
        """How many processes `gather_for_metrics` would not leave out of the batch at hand; None for all."""
        state = self._accelerator.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def read(self, mode: str) -> dict[str, list[float]]:
        """TRL's metrics of every micro-batch since the last call. All processes have to call this."""
        if not self._noted[mode]:
            return {}
        sums, ranks = zip(*self._noted[mode], strict=True)
        self._noted[mode].clear()
        gathered = self._accelerator.gather(torch.stack(sums)[None]).cpu()
        micro_batches = [gathered[:n_ranks, number] for number, n_ranks in enumerate(ranks)]
        read: dict[str, list[float]] = {}
        for sums_of_ranks in micro_batches:
            for name, value in _metrics_of(sums_of_ranks):
                read.setdefault(name, []).append(value)
        return read


def _metrics_of(sums: Tensor) -> Iterator[tuple[str, float]]:
    """A micro-batch's metrics by TRL's names, from the sums `[ranks, 3 or 4]`."""
    n_labels, entropy, n_correct, *aux_loss = sums.sum(dim=0).float()
    yield "entropy", float(entropy / n_labels) if n_labels > 0 else 0.0
    yield "mean_token_accuracy", float(n_correct / n_labels) if n_labels > 0 else 0.0
    for total in aux_loss:
        yield "aux_loss", float(total / len(sums))
