"""Whether a loss can be computed with a model's head, and what that head does."""

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from unsloth_pack.losses.contract import Head
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import GATHERED_BY_MODULE, is_gathered_by_module, is_managed_by_fsdp


def head_of(model: Any, spec: ArchSpec, is_wrapper: bool) -> Head:
    """The head of a causal language model for which `why_head_not_fused` finds nothing.

    Args:
        is_wrapper: whether the model is one around a text model, as of vision and language. transformers
            does not divide the logits there, and caps them only where the spec says so.
    """
    linear: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    softcap = spec.softcap_of_logits(config)
    if is_wrapper:
        return Head(linear, softcap=softcap if spec.wrapper_has_softcap else None)
    return Head(linear, spec.divisor_of_logits(config), softcap)


def outputs_of_head(model: Any) -> int | None:
    """How many logits the head makes for a token; None where some wrapper hides it."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        # From a tied head PEFT 0.21 makes a layer whose in_features and out_features are exchanged
        return len(head.weight)
    return getattr(head, "out_features", None)


def why_head_not_fused(model: Any) -> str | None:
    """Why a model's head must make logits, or None."""
    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        return "the head has an adapter"
    if is_managed_by_fsdp(head):  # FSDP looks for tensors in every field of an output
        return "FSDP shards the head"
    if type(head) is not nn.Linear:  # wrapped by modules_to_save, quantised
        return f"the head is a {type(head).__name__}"
    if is_gathered_by_module(head.weight):
        return GATHERED_BY_MODULE
    if has_hooks(head):
        return "the head has hooks"
    return None


def why_loss_not_fused(model: Any) -> str | None:
    """Why a causal language model's own loss must come from its logits, or None."""
    if (why := why_head_not_fused(model)) is not None:
        return why
    if has_own_loss(model):
        return "the model has a loss function of its own"
    return None


def has_own_loss(model: Any) -> bool:
    """Whether a model computes another loss than the causal language models of transformers."""
    return model.loss_function is not ForCausalLMLoss
