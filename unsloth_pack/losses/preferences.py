"""Losses of answers that somebody prefers or rejects: DPO, KTO and ORPO.

They read sums of log-probabilities over whole answers, of the model and of its reference, in float64.

Shapes: N tokens of a row, D documents. A document has 3 parts: a prompt, a chosen and a rejected answer;
without labels on the prompt its sum is 0. For KTO a document has one of the answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.losses.head import LabelledHead, Loss
from unsloth_pack.losses.prepared import StepInputs
from unsloth_pack.packed_row.row import PackedRow

ANSWERS = "answers"  # the argument of a model's call
PreferenceType = Literal["sigmoid", "ipo", "hinge", "robust"]
Compared = tuple[Tensor, dict[str, Tensor]]


@dataclass
class Answers:
    """The documents of a packed row, on the host."""

    part_of_next: np.ndarray  # `[N]` int64: 3 * document + part of the token behind each
    n_labels: np.ndarray  # `[D, 3]` int64: tokens of each part that carry a label
    reference: np.ndarray | None = None  # `[D, 3]` float64: of the reference, where that is known

    def sum(self, row: PackedRow, values_1N: Tensor) -> Tensor:
        """Sum `[1, N]` over each part: `[D, 3]` float64."""
        parts = row.once(ANSWERS, lambda: row.upload(self.part_of_next))
        values_N = values_1N.flatten().double()
        return values_N.new_zeros(self.n_labels.size).index_add(0, parts, values_N).view(-1, 3)


@dataclass
class PreferenceLoss(ABC):
    """A `PreparedLoss`: the mean of the losses of documents, or their sum divided by `num_items`.

    Args:
        beta: how far the model may go from its reference: less for a larger one.
        reference: a context in which the model that trains is the reference; None for a loss without one, or
            where `Answers` have what it says.

    Attributes:
        values: of the last step, `[D]` float64 each, `n` among them: numbers to add up, see `means`.
    """

    beta: float = 0.1
    reference: Callable[[], AbstractContextManager[None]] | None = None
    values: dict[str, Tensor] = field(default_factory=dict, init=False)

    @abstractmethod
    def compare(self, log_probs_D3: Tensor, reference_D3: Tensor, n_labels_D3: Tensor) -> Compared:
        """Return the loss of every document, and its `values`, `[D]` each."""

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return what is logged, `loss` among it, from sums of `values` over documents."""
        return {name: value / max(sums["n"], 1) for name, value in sums.items() if name != "n"}

    def prepare(self, inputs: StepInputs) -> Loss:
        """Run the reference, unless the answers have what it says."""
        answers: Answers = inputs.call.rest.pop(ANSWERS)
        row: PackedRow = inputs.call.row
        reference_D3 = None
        if answers.reference is not None:
            reference_D3 = row.upload(answers.reference)
        elif self.reference is not None:
            with self.reference(), torch.no_grad():
                labelled, hidden_BTC = inputs.run(inputs.model)
                reference_D3 = answers.sum(row, labelled.scores(hidden_BTC).log_prob)

        def loss_of(
            labelled: LabelledHead, hidden_BTC: Tensor, _: object, num_items: Tensor | float | None
        ) -> Tensor:
            log_probs_D3 = answers.sum(row, labelled.scores(hidden_BTC).log_prob)
            reference = torch.zeros_like(log_probs_D3) if reference_D3 is None else reference_D3
            losses, values = self.compare(log_probs_D3, reference, row.upload(answers.n_labels))
            values = {"n": torch.ones_like(losses), "loss": losses, **values}
            self.values = {name: value.detach() for name, value in values.items()}
            return losses.sum() / (len(losses) if num_items is None else num_items)

        return loss_of


def compare_answers(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    """Return the rewards of pairs, beta times `[D]` each, under TRL's names."""
    return {
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "rewards/margins": beta * (chosen - rejected),
    }


@dataclass
class DpoLoss(PreferenceLoss):
    """Compare the log-ratios of a chosen and a rejected answer, as TRL's `DPOTrainer`.

    Args:
        loss_type: sigmoid (Rafailov et al. 2023), ipo (Azar et al. 2023, of log-ratios a token), hinge
            (Zhao et al. 2023) or robust (Chowdhury et al. 2024).
        label_smoothing: for robust, the share of pairs whose answers are the wrong way round.
    """

    loss_type: PreferenceType = "sigmoid"
    label_smoothing: float = 0.0

    def compare(self, log_probs_D3: Tensor, reference_D3: Tensor, n_labels_D3: Tensor) -> Compared:
        _, chosen, rejected = (log_probs_D3 - reference_D3).unbind(1)
        delta = self.beta * (chosen - rejected)
        if self.loss_type == "sigmoid":
            losses = -F.logsigmoid(delta)
        elif self.loss_type == "hinge":
            losses = torch.relu(1 - delta)
        elif self.loss_type == "ipo":
            _, n_chosen, n_rejected = n_labels_D3.clamp(min=1).unbind(1)
            losses = (chosen / n_chosen - rejected / n_rejected - 1 / (2 * self.beta)) ** 2
        else:
            wrong = self.label_smoothing
            losses = (wrong * F.logsigmoid(-delta) - (1 - wrong) * F.logsigmoid(delta)) / (1 - 2 * wrong)
        values = compare_answers(chosen, rejected, self.beta)
        return losses, values | {"logps/chosen": log_probs_D3[:, 1], "logps/rejected": log_probs_D3[:, 2]}


@dataclass
class OrpoLoss(PreferenceLoss):
    """Learn prompt and chosen answer, and the odds of the chosen over the rejected one (Hong et al. 2024).

    Attributes:
        tokens_a_document: of prompts and chosen answers, over which the first part is a mean; those of a
            step if it is None.
    """

    tokens_a_document: Tensor | float | None = field(default=None, init=False)

    def compare(self, log_probs_D3: Tensor, reference_D3: Tensor, n_labels_D3: Tensor) -> Compared:
        _, chosen, rejected = (log_probs_D3 / n_labels_D3.clamp(min=1)).unbind(1)  # means over tokens
        log_odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
        ratio = F.logsigmoid(log_odds)
        nll, n_tokens = -log_probs_D3[:, :2].sum(1), n_labels_D3[:, :2].sum(1).double()
        each = n_tokens.mean() if self.tokens_a_document is None else self.tokens_a_document
        values = compare_answers(chosen, rejected, self.beta)
        values |= {"logps/chosen": chosen, "logps/rejected": rejected}
        values |= {"nll_loss": nll, "n_tokens": n_tokens}
        values |= {"log_odds_ratio": ratio, "log_odds_chosen": log_odds}
        return nll / each - self.beta * ratio, values

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        means = super().means(sums)
        means["nll_loss"] /= max(means.pop("n_tokens"), 1)
        return means | {"loss": means["nll_loss"] - self.beta * means["log_odds_ratio"]}


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Return log(1 - p) of log(p)."""
    return torch.log(-torch.expm1(log_prob))


@dataclass
class KtoLoss(PreferenceLoss):
    """Compare the log-ratio of one answer with that of answers to other prompts, as TRL's `KTOTrainer`.

    Attributes:
        kl: the mean log-ratio of such answers, at least 0.

    Source: Ethayarajh et al. 2024, eq. 7 and 8.
    """

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: Tensor | float = field(default=0.0, init=False)

    def set_kl(self, log_ratios: Tensor, n_answers: Tensor) -> None:
        """Estimate the KL term from the sum of the log-ratios of answers, which are all chosen."""
        self.kl = (log_ratios / n_answers.clamp(min=1)).clamp(min=0)

    def compare(self, log_probs_D3: Tensor, reference_D3: Tensor, n_labels_D3: Tensor) -> Compared:
        is_chosen = (n_labels_D3[:, 1] > 0).double()
        ratios = (log_probs_D3 - reference_D3).sum(1)  # of the one answer
        gain = self.beta * (2 * is_chosen - 1) * (ratios - self.kl)
        weights = is_chosen * self.desirable_weight + (1 - is_chosen) * self.undesirable_weight
        values = {"n_chosen": is_chosen, "ratio": ratios, "kl": torch.ones_like(ratios) * self.kl}
        for name, share in (("chosen", is_chosen), ("rejected", 1 - is_chosen)):
            values[f"rewards/{name}"] = share * self.beta * ratios
            values[f"logps/{name}"] = share * log_probs_D3.sum(1)
        return weights * (1 - torch.sigmoid(gain)), values

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        n = {"chosen": sums["n_chosen"], "rejected": sums["n"] - sums["n_chosen"]}
        names = (f"{kind}/{answer}" for answer in n if n[answer] for kind in ("rewards", "logps"))
        means = {name: sums[name] / n[name.partition("/")[2]] for name in names}
        if all(n.values()):
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means | {name: sums[name] / max(sums["n"], 1) for name in ("loss", "kl")}
