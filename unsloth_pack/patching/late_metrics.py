"""What TRL logs of every micro-batch of a patched model, read from the device when it is logged.

TRL's `compute_loss` reads entropy, accuracy and tokens on the host after each forward pass, so that the
device runs out of work before the backward pass is launched. The function computes the loss too, and has no
hook between the two. So `SFTTrainer.compute_loss` and `SFTTrainer.log` are wrapped, once for all trainers.
For a patched model and TRL's default loss the loss is computed here, and the sums wait on the device for the
log. Everything else goes through TRL's functions.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.forwards.causal_lm import FastCausalLM
from unsloth_pack.host_copy import HostCopy

_HOME = "trl.trainer.sft_trainer"  # in sys.modules if a trainer of TRL's can be there
_METRICS = "unsloth_pack_late_metrics"  # where a trainer holds what it has not logged yet


class ReadsMetricsLate(TrainerCallback):
    """Wraps TRL's trainer before the first training of a patched model."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if (trainer_class := sft_trainer_of(model)) is not None:
            _wrap(trainer_class)


def sft_trainer_of(model: nn.Module | None) -> Any:
    """TRL's `SFTTrainer`, if it may train this model and the model is patched; else None."""
    home = sys.modules.get(_HOME)
    return None if home is None or model is None or not is_patched(model) else home.SFTTrainer


def _wrap(trainer_class: Any) -> None:
    if hasattr(trainer_class, _METRICS):
        return
    compute, log = trainer_class.compute_loss, trainer_class.log

    @wraps(compute)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        held = vars(self).setdefault(_METRICS, LateMetrics())
        if return_outputs or not reads_late(self):
            held.count_tokens(self)
            return compute(self, model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = default_loss(self, model, inputs, num_items_in_batch)
        held.note(self, outputs, inputs)
        return loss

    @wraps(log)
    def log_all(self: Any, *args: Any, **kwargs: Any) -> None:
        take_over_metrics(self)
        log(self, *args, **kwargs)

    trainer_class.compute_loss, trainer_class.log = compute_loss, log_all
    setattr(trainer_class, _METRICS, None)  # wrapped


def take_over_metrics(trainer: Any) -> None:
    """Put what has been noted since the last call where TRL's `log` looks for it.

    With several processes, all of them have to call this.
    """
    if (held := vars(trainer).get(_METRICS)) is not None:
        held.hand_over(trainer)


def noted_sums(trainer: Any) -> "NotedSums | None":
    """Take what has been noted since the last call, without waiting for the device; None if nothing was."""
    held = vars(trainer).get(_METRICS)
    return None if held is None else held.take(trainer)


def metrics_so_far(trainer: Any) -> dict[str, list[float]]:
    """Take the metrics of training that lie where TRL's `log` looks for them."""
    there = trainer._metrics["train"]
    taken = dict(there)
    there.clear()
    return taken


@contextmanager
def only_these_metrics(trainer: Any, metrics: Mapping[str, list[float]]) -> Iterator[None]:
    """Inside, TRL's `log` adds these metrics of training, and none that are of later updates."""
    put_since, noted_since = metrics_so_far(trainer), vars(trainer).pop(_METRICS, None)
    there = trainer._metrics["train"]
    there.update(metrics)
    try:
        yield
    finally:
        there.clear()
        there.update(put_since)
        if noted_since is not None:
            vars(trainer)[_METRICS] = noted_since


def takes_over_itself(trainer: Any) -> bool:
    """Whether the trainer takes its metrics over before it logs, in every process.

    Such a trainer says so by `takes_over_metrics`, and counts its tokens itself.
    """
    return getattr(trainer, "takes_over_metrics", False)


def reads_late(trainer: Any) -> bool:
    """Whether TRL would compute the loss as `default_loss` does, of a patched model.

    With several processes the trainer has to take its metrics over in all of them: reading the sums gathers
    them.
    """
    arguments = trainer.args
    return (
        arguments.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and trainer.accelerator.parallelism_config is None
        and (trainer.accelerator.num_processes == 1 or takes_over_itself(trainer))
        and is_patched(trainer.model)
    )


def default_loss(
    trainer: Any, model: Any, inputs: dict[str, Any], num_items: Tensor | int | None
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


@dataclass(frozen=True)
class NotedSums:
    """The sums behind the metrics of several micro-batches, in this process.

    Args:
        sums: `[micro-batches, 3]`, or 4 with routed experts; float64, on the device.
        ranks: for each micro-batch, how many processes count; None for all.
        tokens: of training, on their way to the host where they were not known there.
    """

    sums: Tensor
    ranks: Sequence[int | None]
    tokens: Sequence[HostCopy | int]

    def put(self, trainer: Any, metrics: dict[str, list[float]], gathered: Tensor) -> None:
        """Put the values of every micro-batch among metrics, and the trainer's tokens, which go up by these.

        Args:
            metrics: by TRL's names.
            gathered: the sums of all processes, `[processes, micro-batches, 3 or 4]`, on the host.
        """
        for number, n_ranks in enumerate(self.ranks):
            for name, value in _metrics_of(gathered[:n_ranks, number]):
                metrics.setdefault(name, []).append(value)
        tokens = (int(n.read()) if isinstance(n, HostCopy) else n for n in self.tokens)
        trainer._total_train_tokens += sum(tokens)
        metrics["num_tokens"] = [trainer._total_train_tokens]


class LateMetrics:
    """The sums behind a trainer's metrics, on the device until somebody reads them."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor, int | None]]] = {"train": [], "eval": []}
        self._tokens: list[Tensor | int] = []  # of training

    def note(self, trainer: Any, outputs: Any, inputs: dict[str, Any]) -> None:
        """Keep the sums of a micro-batch.

        Args:
            outputs: of the model, to `fused_lm_head=True`.
            inputs: of the model.
        """
        sums = [outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()]
        if outputs.aux_loss is not None:  # of routed experts, where it is part of the loss
            sums.append(outputs.aux_loss.detach())
        mode = _mode(trainer)
        # float64 holds every count and every float32
        self._sums[mode].append((torch.stack([x.double() for x in sums]), _ranks_that_count(trainer)))
        if mode == "train" and not takes_over_itself(trainer):
            self._tokens.append(_tokens_as_trl_counts(inputs))

    def take(self, trainer: Any) -> NotedSums | None:
        """The sums of every micro-batch since the last call, of training or of evaluation."""
        noted = self._sums[_mode(trainer)]
        if not noted:
            return None
        sums, ranks = zip(*noted, strict=True)
        tokens = [HostCopy(n) if isinstance(n, Tensor) else n for n in self._tokens]
        noted.clear()
        self._tokens.clear()
        return NotedSums(torch.stack(sums), ranks, tokens)

    def hand_over(self, trainer: Any) -> None:
        """Put TRL's metrics of every micro-batch since the last call where the trainer keeps them."""
        mode, noted = _mode(trainer), self.take(trainer)
        if noted is None:
            return
        gathered = trainer.accelerator.gather(noted.sums[None]).cpu()
        noted.put(trainer, trainer._metrics[mode], gathered)

    def count_tokens(self, trainer: Any) -> None:
        """Add the tokens noted since the last call to the trainer's."""
        trainer._total_train_tokens += sum(map(int, self._tokens))
        self._tokens.clear()


def is_patched(model: Any) -> bool:
    """Whether a causal language model, with an adapter of PEFT's or without, is patched."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return isinstance(model, FastCausalLM)


def _mode(trainer: Any) -> str:
    """As TRL names the metrics of training and of evaluation."""
    return "train" if trainer.model.training else "eval"


def _ranks_that_count(trainer: Any) -> int | None:
    """How many processes `gather_for_metrics` would not leave out of the batch at hand; None for all."""
    state = trainer.accelerator.gradient_state
    return state.remainder if state.end_of_dataloader and state.remainder > 0 else None


def _tokens_as_trl_counts(inputs: dict[str, Any]) -> Tensor | int:
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    return inputs["position_ids"].size(1) if "position_ids" in inputs else inputs["input_ids"].numel()


def _metrics_of(sums: Tensor) -> Iterator[tuple[str, float]]:
    """A micro-batch's metrics by TRL's names, from the sums `[ranks, 3 or 4]`."""
    n_labels, entropy, n_correct, *aux_loss = sums.sum(dim=0).float()
    yield "entropy", float(entropy / n_labels) if n_labels > 0 else 0.0
    yield "mean_token_accuracy", float(n_correct / n_labels) if n_labels > 0 else 0.0
    for total in aux_loss:
        yield "aux_loss", float(total / len(sums))
