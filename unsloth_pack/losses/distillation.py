"""Learn from a teacher beside the labels: the base model, another model, or what one stored."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import TeacherHead, TopLogProbs, linear_distillation
from unsloth_pack.kernels.arguments import Divergence
from unsloth_pack.losses.head import LabelledHead, Loss
from unsloth_pack.losses.prepared import StepInputs
from unsloth_pack.packed_row.row import PackedRow

TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_ids", "teacher_log_probs"  # arguments of a model's call
Teacher = Callable[[StepInputs], TeacherHead | TopLogProbs]


def model_teacher(
    inputs: StepInputs,
    model: Any = None,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> TeacherHead:
    """Run a patched model, or the one that trains, on the row of a step inside a context: a `Teacher`."""
    with within():
        labelled, hidden_BTC = inputs.run(inputs.model if model is None else model)
        return labelled.call(lambda x, weight, _, **head: TeacherHead(x, weight, **head), hidden_BTC)


def stored_teacher(inputs: StepInputs) -> TopLogProbs:
    """Take a teacher's predictions `[B, T, K]` out of a model's call: a `Teacher`.

    `teacher_ids` and `teacher_log_probs` of a token predict the next one.
    """
    ids, log_probs = (inputs.call.rest.pop(name, None) for name in (TEACHER_IDS, TEACHER_LOG_PROBS))
    if ids is None or log_probs is None:
        raise InputError(f"a stored teacher needs {TEACHER_IDS} and {TEACHER_LOG_PROBS}; give both")
    device = inputs.labelled.mask.device
    return TopLogProbs(ids.to(device), log_probs.to(device))


@dataclass
class DistillationLoss:
    """A `PreparedLoss`: ce_weight * cross-entropy + kl_weight * divergence from a teacher.

    It is a mean over labels, 0 without any, or their sum divided by `num_items`.

    Args: as for `linear_distillation`.

    Attributes:
        values: of the last step, `[B, T]` each, without gradient: `token_count`, 1 at a label, and the parts
            by the names under which they are logged.
    """

    teacher: Teacher
    divergence: Divergence = "forward_kl"
    kl_weight: float = 0.1
    ce_weight: float = 1.0
    temperature: float = 1.0
    values: dict[str, Tensor] = field(default_factory=dict, init=False)

    def prepare(self, inputs: StepInputs) -> Loss:
        """Run the teacher."""
        return partial(self._compare, self.teacher(inputs))

    def _compare(
        self,
        teacher: TeacherHead | TopLogProbs,
        labelled: LabelledHead,
        hidden_BTC: Tensor,
        row: PackedRow | None,
        num_items: Tensor | float | None,
    ) -> Tensor:
        divisor = labelled.mask.sum().clamp(min=1) if num_items is None else num_items
        result = labelled.call(
            linear_distillation,
            hidden_BTC,
            teacher=teacher,
            divergence=self.divergence,
            kl_weight=self.kl_weight,
            ce_weight=self.ce_weight,
            temperature=self.temperature,
            num_items=divisor,
        )
        self.values = {
            "token_count": labelled.mask,
            "sft_loss": result.cross_entropy,
            "kl_loss": result.divergence,
            "teacher_entropy": result.teacher_entropy,
            "token_accuracy": result.is_top1,
        }
        return result.loss

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return what is logged, `loss` among it, from sums of `values` over tokens."""
        n_labels = sums["token_count"]
        means = {name: total / max(n_labels, 1) for name, total in sums.items()}
        loss = self.ce_weight * means["sft_loss"] + self.kl_weight * means["kl_loss"]
        return means | {"loss": loss, "token_count": n_labels}
