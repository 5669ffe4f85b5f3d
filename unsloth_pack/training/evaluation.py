"""Evaluation losses that do not depend on how documents are batched or packed."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer


class DocumentMeans(Trainer):
    """A trainer of TRL's loss that evaluates by token and by document; TRL's own mean is over batches.

    `eval_loss` is the mean over all counted tokens, `eval_sample_loss` the mean over documents of their
    means: the same however the documents are batched, packed or dealt out to ranks.
    """

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        self._document_losses: list[Tensor] = []
        outcome: Any = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        by_rank = gather_object([[batch.cpu() for batch in self._document_losses]])
        as_dealt_out = [batch for turn in zip(*by_rank, strict=True) for batch in turn]
        # The first rows come again at the end where the ranks cannot share them out evenly.
        sums, counts = torch.cat(as_dealt_out, dim=1)[:, : _count_documents(dataloader.dataset)]
        by_token, by_document = sums.sum() / counts.sum(), (sums / counts)[counts > 0].mean()
        outcome.metrics[f"{metric_key_prefix}_loss"] = float(by_token)
        outcome.metrics[f"{metric_key_prefix}_sample_loss"] = float(by_document)
        return outcome

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, None, None]:
        caught: list[Any] = []
        with model.register_forward_hook(lambda *call: caught.append(call[-1])):
            loss, *_ = super().prediction_step(model, inputs, prediction_loss_only=True)
        self._document_losses.append(_document_losses(caught[0], inputs.get("position_ids")))
        return loss, None, None


def _count_documents(rows: Any) -> int:
    packed = "seq_lengths" in rows.column_names
    return sum(map(len, rows.with_format(None)["seq_lengths"])) if packed else len(rows)


def _document_losses(outputs: Any, position_ids: Tensor | None) -> Tensor:
    """`[2, documents]` float64: the summed loss and the counted tokens of every document of a batch.

    Args:
        outputs: of TRL's loss; `log_probs` and `label_mask` are `[B, T - 1]`.
        position_ids: `[1, T]`, restarting at every document; None where each row is one.
    """
    per_token = torch.stack([-outputs.log_probs.double(), outputs.label_mask.double()])
    if position_ids is None:
        return per_token.sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return per_token.new_zeros(2, n_documents).index_add_(1, document, per_token[:, 0])
