"""The objective of a run, where it is not cross-entropy, and what it compares with."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.names import check_model_there
from unsloth_pack.config import flat
from unsloth_pack.config.options import OWN_TEACHERS, DistillOptions, TrainOptions
from unsloth_pack.data.rows import PREFERENCES
from unsloth_pack.errors import InputError
from unsloth_pack.losses.distillation import DistillationLoss
from unsloth_pack.losses.preferences import DpoLoss, KtoLoss, OrpoLoss, PreferenceLoss
from unsloth_pack.run.documents import load_tokenizer
from unsloth_pack.training.distill import Distillation, make_teacher
from unsloth_pack.training.objective import Objective, trained_model
from unsloth_pack.training.preferences import Preferences, make_reference


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


def build_objective(
    o: TrainOptions, model: Any, is_scored: bool = False
) -> Callable[[Any], Objective] | None:
    """Make the objective of a model that is ready to train; None for cross-entropy.

    Loads a teacher that is another model. An adapter that trains on is compared with a copy of it.

    Args:
        is_scored: all rows hold what the reference says.
    """
    objective, options = o.training.objective, o.preferences
    if objective == "distill":
        teacher: Any = o.distill.teacher
        if teacher not in OWN_TEACHERS:
            teacher, _ = FastLanguageModel.from_pretrained(**flat(o.model) | {"model_name": teacher})
        weights = o.distill.model_dump(exclude={"teacher"})
        return partial(Distillation, loss=DistillationLoss(make_teacher(model, teacher), **weights))
    if objective not in PREFERENCES:
        return None
    trained_model(model)
    loss: PreferenceLoss
    goes_on = o.adapter.init_adapter is not None and not o.adapter.merge_init_adapter
    reference = None if objective == "orpo" or is_scored else make_reference(model, goes_on)
    if objective == "dpo":
        loss = DpoLoss(options.beta, reference, options.loss_type, options.label_smoothing)
    elif objective == "kto":
        loss = KtoLoss(options.beta, reference, options.desirable_weight, options.undesirable_weight)
    else:
        loss = OrpoLoss(options.beta)
    return partial(Preferences, loss=loss)
