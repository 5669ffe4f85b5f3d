"""What TRL says of a model that it does not know to be patched, or does to it: a refusal, a cast."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from unsloth_pack.patching.patch import patch_of

# TRL 1.15 warns of leaks unless `attn_implementation` is a FlashAttention. It does not know that the patched
# attention keeps documents apart with every backend,
_UNTRUE = ("Padding-free training is enabled, but the attention", "You are using packing, but the attention")
# nor that a row which was packed before holds several documents.
_UNTRUE_OF_PACKS = "You are using a per_device_train_batch_size of 1 with padding-free training"


@contextmanager
def without_untrue_warnings(is_packed: bool) -> Iterator[None]:
    logger = logging.getLogger("trl.trainer.sft_trainer")
    untrue = (*_UNTRUE, *([_UNTRUE_OF_PACKS] if is_packed else []))

    def is_true(record: logging.LogRecord) -> bool:
        return not any(said in record.getMessage() for said in untrue)  # `in`: it may begin with "[RANK 0]"

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)


@contextmanager
def adapted_head_allowed(model: Any) -> Iterator[None]:
    """Inside this context TRL's trainer sees the layer below an adapter on the head.

    TRL refuses such an adapter, since its loss reads the weight of the head alone. A patched model answers
    TRL with the adapter counted in, see `losses.fusable`.
    """
    head = model.get_output_embeddings()
    if patch_of(model) is None or not isinstance(head, BaseTunerLayer):
        yield
        return
    model.__dict__["get_output_embeddings"] = head.get_base_layer
    try:
        yield
    finally:
        del model.__dict__["get_output_embeddings"]


@contextmanager
def kept_in_own_dtype(model: nn.Module) -> Iterator[None]:
    """Inside this context TRL may set up a trainer; what trains beside LoRA's factors keeps its dtype.

    Where the base is quantised TRL casts all that trains to bfloat16, and modules that train as a whole
    would no longer compute in the dtype of the layers around them.
    """
    own = {p: p.data for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    yield
    for parameter, data in own.items():
        if parameter.dtype != data.dtype:
            parameter.data = data.to(parameter.device)
