"""Decide whether a loss can be computed with a model's head, and read that head."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import ExtraLogits
from unsloth_pack.lora.linear import why_not_fused
from unsloth_pack.losses.contract import Head
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import GATHERED_BY_MODULE, has_hooks, is_gathered_by_module, is_managed_by_fsdp


def read_head(model: Any, spec: ArchSpec, is_wrapper: bool) -> Head:
    """Read the head of a causal language model for which `why_head_not_fused` returns None.

    In a wrapper around a text model, as of vision and language, transformers does not divide the logits, and
    caps them only where the spec says so.
    """
    module: Any = model.get_output_embeddings()
    linear, extra = _unwrap(module)
    config = model.config.get_text_config()
    softcap, divisor = spec.read_logit_softcap(config), spec.read_logit_divisor(config)
    if is_wrapper:
        softcap, divisor = softcap if spec.wrapper_has_softcap else None, 1.0
    return Head(module, linear.weight, linear.bias, divisor, softcap, extra)


def count_head_outputs(model: Any) -> int | None:
    """Return how many logits the head computes for a token, or None if a wrapper hides it."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        # From a tied head PEFT 0.21 makes a layer whose in_features and out_features are exchanged
        return len(head.weight)
    if isinstance(head, TrainableTokensWrapper):
        head = head.token_adapter.base_layer
    return getattr(head, "out_features", None)


def why_head_not_fused(model: Any) -> str | None:
    """Return why a model's head must compute logits, or None."""
    head = model.get_output_embeddings()
    if is_managed_by_fsdp(head):  # FSDP looks for tensors in every field of an output
        return "FSDP shards the head"
    linear, _ = _unwrap(head)
    if linear is not head and (why := _why_wrapper_not_fused(head)) is not None:
        return why
    if type(linear) is not nn.Linear:  # quantised, or wrapped in another way
        return f"the head is a {type(linear).__name__}"
    if any(map(is_gathered_by_module, head.parameters())):
        return GATHERED_BY_MODULE
    if has_hooks(head, linear):
        return "the head has hooks"
    return None


def refuse_ignored_adapter(model: Any, why_not: str) -> None:
    """Refuse a head with an adapter that TRL's own loss would ignore: it reads the weight alone.

    Raises:
        InputError: the head has an adapter in use.
    """
    if isinstance(head := model.get_output_embeddings(), BaseTunerLayer) and not (
        head.disable_adapters or head.merged
    ):
        raise InputError(
            f"the head has an adapter, which TRL's loss passes over here ({why_not}); leave lm_head out of "
            "target_modules"
        )


def why_loss_not_fused(model: Any) -> str | None:
    """Return why a causal language model's own loss must come from its logits, or None."""
    if (why := why_head_not_fused(model)) is not None:
        return why
    if has_own_loss(model):
        return "the model has a loss function of its own"
    return None


def has_own_loss(model: Any) -> bool:
    """Return whether a model computes another loss than transformers' causal language models."""
    return model.loss_function is not ForCausalLMLoss


def _unwrap(head: Any) -> tuple[Any, Callable[[Tensor], ExtraLogits] | None]:
    """Return the linear layer inside PEFT's wrapper, and what is added to its outputs or replaces them."""
    if isinstance(head, ModulesToSaveWrapper):
        is_off = head.disable_adapters or not head.active_adapters
        return (head.original_module if is_off else head.modules_to_save[head.active_adapters[0]]), None
    if isinstance(head, TrainableTokensWrapper):
        head = head.token_adapter
    if isinstance(head, TrainableTokensLayer):
        names = [] if head.disable_adapters or head.merged else head.active_adapters
        return head.base_layer, partial(_trained_token_logits, head, names) if names else None
    if isinstance(head, LoraLinear):
        is_off = head.disable_adapters or head.merged
        return head.base_layer, None if is_off else partial(_lora_logits, head)
    return head, None


def _why_wrapper_not_fused(head: Any) -> str | None:
    if isinstance(head, ModulesToSaveWrapper):
        return None
    if isinstance(head, TrainableTokensWrapper | TrainableTokensLayer):
        layer = head.token_adapter if isinstance(head, TrainableTokensWrapper) else head
        if layer.base_layer.bias is not None:  # PEFT ignores it
            return "tokens of a head with a bias are trained"
        return "several adapters train tokens of the head" if len(layer.active_adapters) > 1 else None
    if head.disable_adapters or head.merged:
        return None
    why = why_not_fused(head)
    if why is None:
        (name,) = head.active_adapters
        if getattr(head.lora_dropout[name], "p", 0):
            why = "LoRA dropout"
        elif head.lora_B[name].bias is not None:
            why = "its bias is trained"
    return None if why is None else f"the head has an adapter: {why}"


def _trained_token_logits(layer: Any, names: list[str], x: Tensor) -> ExtraLogits:
    (name,) = names
    outputs = torch.tensor(layer.token_indices[name])
    if x.is_cuda:  # from pinned memory, so that nothing waits
        outputs = outputs.pin_memory().to(x.device, non_blocking=True)
    trained = layer.trainable_tokens_delta[name].to(layer.base_layer.weight.dtype)
    return ExtraLogits(F.linear(x, trained), outputs=outputs)


def _lora_logits(layer: Any, x: Tensor) -> ExtraLogits:
    (name,) = layer.active_adapters
    lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
    dtype = layer.base_layer.weight.dtype
    return ExtraLogits(F.linear(x, lora_a.to(dtype)) * layer.scaling[name], b=lora_b.to(dtype))
