"""What TRL's trainers are set up with for rows that are tokenised: configuration, collator, template."""

import os
from typing import Any

import torch
import trl
from packaging.version import Version
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.errors import InputError


def sft_config(
    output_dir: str,
    *,
    padding_free: bool,
    dtype: torch.dtype,
    **arguments: Any,
) -> SFTConfig:
    """TRL's configuration for rows that are already tokenised, cut and perhaps packed.

    Args:
        padding_free: join a batch into one row, in which no document sees another. Packed rows need it.
        dtype: of the model's weights; mixed precision follows it on CUDA.
        arguments: of transformers' `TrainingArguments`.

    Raises:
        InputError: what TRL or transformers refuse.
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
        raise InputError(
            f"transformers refuses these arguments: {error}; change or leave out what it names"
        ) from error
    if config.fsdp:
        # Keep all dtypes, and so sum gradients in float32. accelerate's own policy would cast the rotary
        # tables, the loss and the gradients to bfloat16.
        config.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(cast_forward_inputs=False)
    # A process trains on one GPU. If it sees more, the trainer would make replicas that share one forward.
    config._n_gpu = min(1, config.n_gpu)
    return config


def _loss_needs_cuda() -> bool:
    """Whether TRL's loss needs CUDA. Before 1.16 it is a Triton kernel, which a CPU can only interpret."""
    return Version(trl.__version__) < Version("1.16.0.dev0") and os.environ.get("TRITON_INTERPRET") != "1"


def rows_of_an_update(config: SFTConfig) -> int:
    """Rows that one process sees between two updates of the weights."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps


def row_collator() -> DataCollatorForLanguageModeling:
    """TRL's own collator, as its trainer makes one for packed rows."""
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """TRL's template that marks assistant turns; None if the tokenizer's own does, or if TRL has none."""
    if not tokenizer.chat_template or has_generation_markers(tokenizer.get_chat_template()):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # TRL has none; `tokenize` refuses rows that need one
        return None
