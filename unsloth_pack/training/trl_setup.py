"""Set up TRL's trainer for rows that are already tokenised: configuration, collator, template, warnings."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments
from trl import SFTConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.errors import InputError
from unsloth_pack.patching.patch import patch_of


def sft_config(output_dir: str, *, padding_free: bool, dtype: torch.dtype, **arguments: Any) -> SFTConfig:
    """Make TRL's configuration for rows that are already tokenised, cut and perhaps packed.

    `padding_free` joins a batch into one row, in which no document sees another; packed rows need it. `dtype`
    is that of the model's weights, which mixed precision follows on CUDA. Raises InputError for what TRL or
    transformers refuse.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu and _loss_needs_cuda():
        raise InputError(f"TRL {trl.__version__} trains on CUDA only; pip install 'trl>=1.16'")
    try:
        config = SFTConfig(
            output_dir=output_dir,
            packing=False,  # done already, over the whole data set
            padding_free=padding_free,
            max_length=None,
            bf16=on_gpu and dtype == torch.bfloat16,
            fp16=on_gpu and dtype == torch.float16,
            use_cpu=not on_gpu,
            dataloader_pin_memory=on_gpu,
            ddp_find_unused_parameters=False,  # every adapter is used, and the search takes time every step
            ddp_broadcast_buffers=False,  # they are rotary frequencies, which may depend on a rank's own row
            gradient_checkpointing=False,  # the model has its own if asked for; TRL would replace it
            logging_nan_inf_filter=False,  # it would wait for the device every step
            accelerator_config={"non_blocking": on_gpu},  # so would a copy to the device that blocks
            disable_tqdm=True,
            **arguments,
        )
    except (ValueError, TypeError, ImportError) as error:
        message = f"transformers refuses these arguments: {error}; change or leave out what it names"
        raise InputError(message) from error
    # A process trains on one GPU. If it sees more, the trainer would make replicas that share one forward.
    config._n_gpu = min(1, config.n_gpu)
    return config


def _loss_needs_cuda() -> bool:
    """True if TRL's loss needs CUDA. Before 1.16 it is a Triton kernel, which a CPU can only interpret."""
    return Version(trl.__version__) < Version("1.16.0.dev0") and os.environ.get("TRITON_INTERPRET") != "1"


def rows_of_an_update(config: TrainingArguments) -> int:
    """Count the rows of one process between two updates of the weights."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps


def row_collator() -> DataCollatorForLanguageModeling:
    """Make TRL's own collator, as its trainer does for packed rows."""
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return TRL's template that marks assistant turns; None if the tokenizer's own does, or TRL has none."""
    if not tokenizer.chat_template or has_generation_markers(tokenizer.get_chat_template()):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # TRL has none; `tokenize` refuses rows that need one
        return None


# TRL 1.15 warns of leaks unless `attn_implementation` is a FlashAttention. It does not know that the patched
# attention keeps documents apart with every backend,
UNTRUE = ("Padding-free training is enabled, but the attention", "You are using packing, but the attention")
# nor that a row which was packed before holds several documents.
UNTRUE_OF_PACKS = "You are using a per_device_train_batch_size of 1 with padding-free training"


@contextmanager
def silenced(logger_name: str, *untrue: str) -> Iterator[None]:
    """Drop messages of a logger with one of these texts, inside this context."""
    logger = logging.getLogger(logger_name)

    def is_true(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in untrue)  # `in`: it may begin with "[RANK 0]"

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)


@contextmanager
def adapted_head_allowed(model: Any) -> Iterator[None]:
    """Show TRL's trainer the layer below an adapter on the head, inside this context. TRL refuses the
    adapter, but a patched model answers TRL with the adapter counted in, see `losses.head`."""
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
    """Keep the dtype of trained weights beside LoRA's while TRL sets up a trainer. Over a quantised base it
    casts all that trains to bfloat16, whatever the dtype of the layers around."""
    own = {p: p.data for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    yield
    for parameter, data in own.items():
        if parameter.dtype != data.dtype:
            parameter.data = data.to(parameter.device)
