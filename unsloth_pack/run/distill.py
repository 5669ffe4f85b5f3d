"""The objective distill of a run, and its teacher."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.names import check_model_there
from unsloth_pack.config import flat
from unsloth_pack.config.options import OWN_TEACHERS, DistillOptions, ModelOptions
from unsloth_pack.errors import InputError
from unsloth_pack.losses.distillation import DistillationLoss
from unsloth_pack.run.documents import load_tokenizer
from unsloth_pack.training.distill import Distillation, make_teacher


def check_teacher(distill: DistillOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher that is not there, or whose tokenizer has other tokens."""
    if distill.teacher in OWN_TEACHERS:
        return
    check_model_there(distill.teacher)
    theirs, ours = load_tokenizer(distill.teacher).get_vocab(), tokenizer.get_vocab()
    if differ := [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]:
        raise InputError(
            f"teacher {distill.teacher!r} has another tokenizer, which differs in {len(differ):,} tokens; "
            "give a model of the same family"
        )


def build_distillation(
    distill: DistillOptions, options: ModelOptions, model: Any
) -> Callable[[Any], Distillation]:
    """Make the objective of a model that is ready to train; loads a teacher that is another model."""
    teacher: Any = distill.teacher
    if teacher not in OWN_TEACHERS:
        teacher, _ = FastLanguageModel.from_pretrained(**flat(options) | {"model_name": teacher})
    weights = distill.model_dump(exclude={"teacher"})
    return partial(Distillation, loss=DistillationLoss(make_teacher(model, teacher), **weights))
