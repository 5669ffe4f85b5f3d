"""Train by a `DistillationLoss`: in a run, and in notebooks by `DistillTrainer`.

    config = SFTConfig(packing=True, padding_free=True)
    DistillTrainer(model, config, train_dataset=rows, teacher="base", kl_weight=0.2).train()

Logged beside the loss, in nats a token, over all processes: `sft_loss`, `kl_loss` and `teacher_entropy`; and
`token_accuracy` and `token_count`, of tokens with a label.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from unsloth_pack.errors import InputError
from unsloth_pack.kernels.arguments import Divergence
from unsloth_pack.lora.base_model import FrozenCopy, base_model, name_trained_in_place
from unsloth_pack.losses.distillation import DistillationLoss, Teacher, model_teacher, stored_teacher
from unsloth_pack.losses.head import count_head_outputs
from unsloth_pack.training.document_losses import Batch, DocumentLosses, Values, losses_of_tokens
from unsloth_pack.training.notebooks import SFTTrainer
from unsloth_pack.training.objective import Objective, causal_lm, trained_model
from unsloth_pack.training.token_columns import TokenColumnCollator

BASE, INIT_ADAPTER, STORED = "base", "init_adapter", "stored"
_N_LINES = 8  # of the log, that a jump is judged by
_JUMP, _LEAST = 3.0, 0.1  # times the greatest of them; nats a token

logger = logging.getLogger("unsloth_pack")


def make_teacher(model: Any, teacher: str | PreTrainedModel = BASE) -> Teacher:
    """Return the teacher of a patched model that is to train.

    Args:
        teacher: "base" is the model without its adapter, "init_adapter" a copy of what trains as it is now,
            "stored" what batches hold, see `TokenColumnCollator`. Or another patched model, which is frozen.

    Raises:
        InputError: the model has no base, the other has other outputs or is the same, or a head only computes
            logits.
    """
    student = trained_model(model)
    if teacher == BASE:
        if name := name_trained_in_place(model):
            raise InputError(
                f"teacher is 'base', and {name} of it trains; give another model, or do not train it"
            )
        return partial(model_teacher, within=partial(base_model, student))
    if teacher == INIT_ADAPTER:
        return partial(model_teacher, within=FrozenCopy(student).in_place)
    if teacher == STORED:
        return stored_teacher
    other = causal_lm(teacher)
    if other is student:  # PEFT puts an adapter into the model that it is given
        raise InputError("teacher is the model that trains; give 'base' or 'init_adapter', or load another")
    ours, theirs = (count_head_outputs(each) for each in (student, other))
    if ours != theirs:
        raise InputError(
            f"the teacher has {theirs} outputs, the model {ours}; take a teacher of its vocabulary"
        )
    other.requires_grad_(False).eval()
    return partial(model_teacher, model=other)


class Distillation(Objective):
    """The objective of learning from a teacher: means over labels."""

    def __init__(self, trainer: Any, loss: DistillationLoss):
        super().__init__(trainer, loss)
        self._divergences: deque[float] = deque(maxlen=_N_LINES)  # of the last lines

    def list_frozen_passes(self, batches: Sequence[Batch]) -> list[tuple[Any, Batch]]:
        loss: Any = self.loss
        if loss.teacher is stored_teacher:
            return []
        model = loss.teacher.keywords.get("model", self._model)  # see `make_teacher`
        return [(model, batch) for batch in batches]

    def losses_of_evaluation(self) -> DocumentLosses:
        def read(_: object) -> Values:  # the last token predicts none
            return {name: x[:, :-1] for name, x in self.loss.values.items()}

        return losses_of_tokens(read, self.loss.means)

    def put_metrics(self, trainer: Any, metrics: dict[str, list[float]], sums: Tensor, n_tokens: int) -> None:
        super().put_metrics(trainer, metrics, sums, n_tokens)
        (divergence,), before, step = metrics["kl_loss"], self._divergences, trainer.state.global_step
        if not trainer.is_world_process_zero():
            return
        if not math.isfinite(divergence):
            logger.warning("kl_loss is %s about update %d; lower learning_rate", divergence, step)
            return
        if len(before) == _N_LINES and divergence > max(_LEAST, _JUMP * max(before)):
            said = "kl_loss jumps to %.3g about update %d, from at most %.3g in the %d log lines before"
            logger.warning(said, divergence, step, max(before), _N_LINES)
        before.append(divergence)


class DistillTrainer(SFTTrainer):
    """`SFTTrainer` that also learns from a teacher: ce_weight * cross-entropy + kl_weight * divergence.

    Args:
        model, args, kwargs: as for `SFTTrainer`. The model is patched, as `FastLanguageModel` loads it.
        teacher: see `make_teacher`.
        divergence, kl_weight, ce_weight, temperature: as for `kernels.linear_distillation`.

    Raises:
        InputError: as `make_teacher`; both weights are 0, or args name another loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        teacher: str | PreTrainedModel = BASE,
        divergence: Divergence = "forward_kl",
        kl_weight: float = 0.1,
        ce_weight: float = 1.0,
        temperature: float = 1.0,
        **kwargs: Any,
    ):
        if not (kl_weight >= 0 and ce_weight >= 0 and kl_weight + ce_weight > 0):
            raise InputError(f"kl_weight is {kl_weight} and ce_weight {ce_weight}; give a positive one")
        super().__init__(model, args, **kwargs)
        config: Any = self.args
        if config.loss_type != "nll" or self.label_smoother is not None or self.compute_loss_func:
            raise InputError("args name a loss of TRL's, and the teacher's is another; leave it out")
        loss = DistillationLoss(
            make_teacher(self.model, teacher), divergence, kl_weight, ce_weight, temperature
        )
        self.distillation = Distillation(self, loss)
        if teacher == STORED:
            config.remove_unused_columns = False
            self.data_collator = TokenColumnCollator(self.data_collator)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss, outputs = self.distillation.compute_loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss
