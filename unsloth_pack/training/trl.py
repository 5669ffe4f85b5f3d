"""The one file that knows TRL: its configuration, its trainer, its templates, its log."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl
from datasets import Dataset
from packaging.version import Version
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.errors import InputError
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.training.checkpoints import WholeCheckpoints
from unsloth_pack.training.collator import RowCollator
from unsloth_pack.training.evaluation import DocumentMeans
from unsloth_pack.training.finite_updates import FiniteUpdates
from unsloth_pack.training.memory_watch import MemoryWatch
from unsloth_pack.training.row_order import PackedRows
from unsloth_pack.training.sharded_weights import ShardedWeights


class RunTrainer(
    PackedRows, DocumentMeans, MemoryWatch, FiniteUpdates, WholeCheckpoints, ShardedWeights, SFTTrainer
):
    """TRL's trainer for packed rows and long runs, which are interrupted and meet infinite numbers."""

    def _send_telemetry(self) -> None:
        """TRL's own reports its use over the network; this one keeps it to itself."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log the tokens trained on. TRL's count leaves out rows that come again to fill all ranks."""
        for metrics in self._metrics.values():
            if "num_tokens" in metrics:
                metrics["num_tokens"] = [self.trained.tokens]
        super().log(*args, **kwargs)


def sft_config(
    output_dir: str,
    *,
    padding_free: bool,
    dtype: torch.dtype,
    **arguments: Any,
) -> SFTConfig:
    """TRL's configuration for rows that are tokenised, cut and perhaps packed already.

    Args:
        padding_free: a batch becomes one row of documents, none seeing another. Packed rows need it.
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
            ddp_find_unused_parameters=False,  # every adapter is used; searching takes time every step
            ddp_broadcast_buffers=False,  # rotary frequencies; where they change, each rank's fit its own row
            gradient_checkpointing=False,  # the model has its own where asked; TRL would replace it
            logging_nan_inf_filter=False,  # it would wait for the device every step
            disable_tqdm=True,
            **arguments,
        )
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(
            f"transformers refuses these arguments: {error}; change or leave out what it names"
        ) from error
    if config.fsdp:
        # Weights as they are, gradients summed in float32: accelerate's own policy would cast the rotary
        # tables, the loss and the gradients to bfloat16.
        config.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(cast_forward_inputs=False)
    # A process trains on one GPU: with more in sight, the trainer would make replicas that share one forward.
    config._n_gpu = min(1, config.n_gpu)
    return config


def _loss_needs_cuda() -> bool:
    """Whether TRL's loss is a Triton kernel without a CPU path, as before 1.16, and nothing interprets it."""
    return Version(trl.__version__) < Version("1.16.0.dev0") and os.environ.get("TRITON_INTERPRET") != "1"


def make_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    train_rows: Dataset,
    eval_rows: Dataset | None,
    callbacks: Sequence[TrainerCallback],
) -> RunTrainer:
    """TRL's own trainer over tokenised rows, printing nothing by itself."""
    from transformers import PrinterCallback

    with _without_untrue_warnings(is_packed="seq_lengths" in train_rows.column_names):
        trainer = RunTrainer(
            model=model,
            args=config,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    trainer.remove_callback(PrinterCallback)
    if patch_of(model) is not None:
        trainer.data_collator = RowCollator(trainer.data_collator)
    return trainer


def row_collator() -> DataCollatorForLanguageModeling:
    """TRL's own collator, as its trainer makes it for packed rows."""
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A chat template that marks assistant turns, where TRL has one for this tokenizer; None for its own."""
    if not tokenizer.chat_template or has_generation_markers(tokenizer.get_chat_template()):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # TRL has none; `tokenize` says so where it matters
        return None


# TRL 1.15 wants `attn_implementation` to be a FlashAttention, and warns of leaking documents otherwise. It
# does not know that the patched attention keeps documents apart in every backend.
_UNTRUE = ("Padding-free training is enabled, but the attention", "You are using packing, but the attention")
# Nor that rows which come in packed hold several documents each.
_UNTRUE_OF_PACKS = "You are using a per_device_train_batch_size of 1 with padding-free training"


@contextmanager
def _without_untrue_warnings(is_packed: bool) -> Iterator[None]:
    logger = logging.getLogger("trl.trainer.sft_trainer")
    untrue = (*_UNTRUE, *([_UNTRUE_OF_PACKS] if is_packed else []))

    def is_true(record: logging.LogRecord) -> bool:
        return not any(said in record.getMessage() for said in untrue)  # behind the rank, "[RANK 0] ..."

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
