"""A run's trainer for classes of documents: one packed row a batch, one answer a document."""

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, Trainer
from trl import SFTTrainer

from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.training.document_losses import DocumentLosses
from unsloth_pack.training.trainer import RunTrainer

_CPU = torch.device("cpu")


class LabelledRowCollator:
    """Join rows, packed or not, into one; each document's label stands at its last token."""

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids, labels = (torch.tensor([x for e in examples for x in e[n]]) for n in ("input_ids", "labels"))
        row = PackedRow.of_lengths(
            tuple(n for e in examples for n in e.get("seq_lengths", [len(e["input_ids"])])), _CPU
        )
        return {"input_ids": ids[None], "labels": labels[row.last_tokens], "packed_row": row}


class DocumentAnswers(DocumentLosses):
    """The loss of every document of one evaluation, and whether its class was found."""

    def _of_batch(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return `[2, documents]` float64."""
        logits, labels = outputs.logits.double(), inputs["labels"]
        is_right = logits.argmax(dim=1) == labels
        return torch.stack([F.cross_entropy(logits, labels, reduction="none"), is_right.double()])

    def _means_of(self, by_document: Tensor, prefix: str) -> dict[str, float]:
        loss, accuracy = by_document.mean(dim=1).tolist()
        return {f"{prefix}_loss": loss, f"{prefix}_accuracy": accuracy}


class _ModelsOwnLoss(SFTTrainer):
    """The loss that the model computes, as transformers' trainer takes it: TRL's is of tokens."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


class ClassificationTrainer(RunTrainer, _ModelsOwnLoss):
    """A `RunTrainer` of a model that answers once per document; evaluates its loss and accuracy."""

    def __init__(self, *, model: Any, **kwargs: Any):
        own = vars(model.get_base_model() if isinstance(model, PeftModel) else model)
        own["generation_config"] = GenerationConfig()  # TRL's trainer sets the padding token there
        super().__init__(model=model, **kwargs)
        self.data_collator = LabelledRowCollator()
        for name in ("generation_config", "forward"):  # of TRL, for a language model's head
            own.pop(name, None)

    def losses_of_evaluation(self) -> DocumentAnswers:
        return DocumentAnswers()
