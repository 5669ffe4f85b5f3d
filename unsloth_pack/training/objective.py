"""The objective of a trainer: it computes the loss of its batches, and logs the parts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsloth_pack.errors import InputError
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.losses.head import why_loss_not_fused
from unsloth_pack.losses.prepared import PreparedLoss
from unsloth_pack.modules import base_of
from unsloth_pack.patching.deferred_logging import is_patched, logging_of
from unsloth_pack.training.document_losses import Batch, DocumentLosses


def causal_lm(model: Any) -> FastCausalLM:
    """Return the patched model inside an adapter's; InputError if it is not patched."""
    if not is_patched(model):
        raise InputError(f"a {type(model).__name__} is not patched; load it with FastLanguageModel")
    base: FastCausalLM = base_of(model)
    return base


def trained_model(model: Any) -> FastCausalLM:
    """As `causal_lm`, of a model that is to train for an objective; InputError if its loss needs logits."""
    base = causal_lm(model)
    if why := why_loss_not_fused(base):
        raise InputError(f"the loss of an objective computes no logits: {why}; change that")
    if getattr(base.config.get_text_config(), "output_router_logits", False):
        said = "output_router_logits is true in the model's config, and an objective has no loss of routers"
        raise InputError(f"{said}; set it to false there")
    return base


class LossOfParts(PreparedLoss, Protocol):
    """A `PreparedLoss` whose parts are logged."""

    values: dict[str, Tensor]  # of the last step: numbers to add up, by token or by document

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return what is logged, `loss` among it, from sums of `values`."""


class Objective(ABC):
    """Computes the loss of a trainer's batches, and logs its parts without waiting for the device."""

    def __init__(self, trainer: Any, loss: LossOfParts):
        self.loss = loss
        self._model = causal_lm(trainer.model)
        self._trainer = trainer
        self._evaluated = torch.zeros(1)  # sums over the batches of an evaluation
        logging_of(trainer).put_metrics = self.put_metrics

    @abstractmethod
    def losses_of_evaluation(self) -> DocumentLosses:
        """Return what records the losses of one evaluation."""

    def begin_update(self, batches: Sequence[Batch], n_labels: Tensor | int | None) -> Tensor | int | None:
        """Look at all micro-batches of an update; return the divisor of its loss, over all processes.

        Args:
            n_labels: over all processes.
        """
        return n_labels

    def list_frozen_passes(self, batches: Sequence[Batch]) -> list[tuple[Any, Batch]]:
        """Return each further pass of an update, without gradients: a model and its batch."""
        return []

    def run(self, model: nn.Module, inputs: Batch, **options: object) -> Any:
        """Run the model with the objective's loss."""
        before, self._model.training_loss = self._model.training_loss, self.loss
        try:
            return model(**inputs | {"use_cache": False}, **options)
        finally:
            self._model.training_loss = before

    def compute_loss(
        self, model: nn.Module, inputs: Batch, num_items: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        """Compute the loss of a micro-batch, over `num_items` or its own; return the output too."""
        trainer = self._trainer
        options = {}
        if num_items is not None:
            options["num_items_in_batch"] = torch.as_tensor(num_items).clamp(min=1)  # as TRL
        outputs = self.run(model, inputs, **options)
        loss = outputs.loss
        if num_items is not None and trainer.args.average_tokens_across_devices:
            loss = loss * trainer.accelerator.num_processes
        sums = [x.sum() for x in self.loss.values.values()]
        if model.training:
            logging_of(trainer).add_sums(trainer, sums, inputs)
        elif not logging_of(trainer).is_of_run:
            self._add_evaluated(torch.stack([x.double() for x in sums]))
        return loss, outputs

    def put_metrics(self, trainer: Any, metrics: dict[str, list[float]], sums: Tensor, n_tokens: int) -> None:
        """Append the means over `[processes, micro-batches, sums]` to TRL's metrics."""
        metrics |= self._means(sums.sum(dim=(0, 1)))
        trainer._total_train_tokens += n_tokens
        metrics["num_tokens"] = [trainer._total_train_tokens]

    def _add_evaluated(self, sums: Tensor) -> None:
        """Add the sums of a batch of an evaluation, and put the means where TRL's `log` looks for them."""
        metrics = self._trainer._metrics["eval"]
        gathered = self._trainer.accelerator.gather_for_metrics(sums[None]).sum(0)
        self._evaluated = gathered + (self._evaluated if metrics else 0)
        metrics |= self._means(self._evaluated)

    def _means(self, sums: Tensor) -> dict[str, list[float]]:
        """Return what is logged beside the loss, as TRL's metrics."""
        means = self.loss.means(dict(zip(self.loss.values, sums.tolist(), strict=True)))
        return {name: [mean] for name, mean in means.items() if name != "loss"}
