"""A run's trainer for classes of documents: one packed row a batch, one answer a document."""

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel, Trainer
from trl import SFTTrainer

from unsloth_pack.modules import base_of
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.training.document_losses import Batch, DocumentLosses, Values
from unsloth_pack.training.trainer import RunTrainer

_CPU = torch.device("cpu")


class LabelledRowCollator:
    """Join rows, packed or not, into one; each document's label stands at its last token."""

    def __call__(self, examples: Sequence[Batch]) -> Batch:
        ids, labels = (torch.tensor([x for e in examples for x in e[n]]) for n in ("input_ids", "labels"))
        row = PackedRow.of_lengths(
            tuple(n for e in examples for n in e.get("seq_lengths", [len(e["input_ids"])])), _CPU
        )
        return {"input_ids": ids[None], "labels": labels[row.last_tokens], "packed_row": row}


def _read_answers(outputs: Any, inputs: Batch) -> Values:
    """Return the loss of every document, and whether its class was found."""
    logits, labels = outputs.logits.double(), inputs["labels"]
    is_right = logits.argmax(dim=1) == labels
    return {"loss": F.cross_entropy(logits, labels, reduction="none"), "accuracy": is_right.double()}


class _ModelsOwnLoss(SFTTrainer):
    """The loss that the model computes, as transformers' trainer takes it: TRL's is of tokens."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


class ClassificationTrainer(RunTrainer, _ModelsOwnLoss):
    """A `RunTrainer` of a model that answers once per document; evaluates its loss and accuracy."""

    def __init__(self, *, model: PreTrainedModel | PeftModel, **kwargs: Any):
        own = vars(base_of(model))
        own["generation_config"] = GenerationConfig()  # TRL's trainer sets the padding token there
        super().__init__(model=model, **kwargs)
        self.data_collator = LabelledRowCollator()
        for name in ("generation_config", "forward"):  # of TRL, for a language model's head
            own.pop(name, None)

    def losses_of_evaluation(self) -> DocumentLosses:
        return DocumentLosses(_read_answers, lambda values: {n: float(x.mean()) for n, x in values.items()})
