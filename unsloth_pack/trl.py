"""The one file that knows TRL: its configuration, its trainer, its templates, its log."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from datasets import Dataset
from packaging.version import Version
from torch.utils.data import Sampler
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.errors import InputError
from unsloth_pack.packing import PackedSampler


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
        return SFTConfig(
            output_dir=output_dir,
            packing=False,  # done already, over the whole data set
            padding_free=padding_free,
            max_length=None,
            bf16=on_gpu and dtype == torch.bfloat16,
            fp16=on_gpu and dtype == torch.float16,
            use_cpu=not on_gpu,
            dataloader_pin_memory=on_gpu,
            ddp_find_unused_parameters=False,  # every adapter is used; searching takes time every step
            gradient_checkpointing=False,  # the model has its own where asked; TRL would replace it
            logging_nan_inf_filter=False,  # it would wait for the device every step
            disable_tqdm=True,
            **arguments,
        )
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"transformers refuses these arguments: {error}") from error


def _loss_needs_cuda() -> bool:
    """Whether TRL's loss is a Triton kernel without a CPU path, as before 1.16, and nothing interprets it."""
    return Version(trl.__version__) < Version("1.16.0.dev0") and os.environ.get("TRITON_INTERPRET") != "1"


class PackedTrainer(SFTTrainer):
    """TRL's own trainer, but for the order of packed rows and the mean of an evaluation.

    `packed_sampler`, where there is one, deals the rows out to the ranks. An evaluation gives `eval_loss`,
    the mean over all counted tokens, and `eval_sample_loss`, the mean over documents of their means: the same
    however the documents are batched or packed. TRL's own is a mean over batches.
    """

    packed_sampler: PackedSampler | None = None

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        if self.packed_sampler is None:
            return super()._get_train_sampler(train_dataset)
        return _DealtInTurn(self.packed_sampler)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        self._document_losses: list[torch.Tensor] = []
        outcome: Any = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        here = torch.cat(self._document_losses, dim=1).cpu()
        sums, counts = torch.cat(gather_object([here]), dim=1)
        by_token, by_document = sums.sum() / counts.sum(), (sums / counts)[counts > 0].mean()
        outcome.metrics[f"{metric_key_prefix}_loss"] = float(by_token)
        outcome.metrics[f"{metric_key_prefix}_sample_loss"] = float(by_document)
        return outcome

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        caught: list[Any] = []
        with model.register_forward_hook(lambda *call: caught.append(call[-1])):
            loss, *_ = super().prediction_step(model, inputs, prediction_loss_only=True)
        self._document_losses.append(_document_losses(caught[0], inputs.get("position_ids")))
        return loss, None, None


def _document_losses(outputs: Any, position_ids: torch.Tensor | None) -> torch.Tensor:
    """`[2, documents]` float64: the summed loss and the counted tokens of every document of a batch.

    Args:
        outputs: of TRL's loss; `log_probs` and `label_mask` are `[B, T - 1]`.
        position_ids: `[1, T]`, restarting at every document; None where each row is one.
    """
    per_token = torch.stack([-outputs.log_probs.double(), outputs.label_mask.double()])
    if position_ids is None:
        return per_token.sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return per_token.new_zeros(2, n_documents).index_add_(1, document, per_token[:, 0])


class _DealtInTurn(Sampler[int]):
    """All ranks' rows, in the order in which accelerate deals them out."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler.dealt_in_turn().tolist())


class _TurnToEpoch(TrainerCallback):
    """Tells the sampler the epoch; accelerate does not where it skips batches of a resumed one."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


def make_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    train_rows: Dataset,
    eval_rows: Dataset | None,
    callbacks: Sequence[TrainerCallback],
) -> PackedTrainer:
    """TRL's own trainer over tokenised rows, printing nothing by itself.

    Rows with `seq_lengths` are shuffled by a `PackedSampler`, which evens out the ranks' work.
    """
    from transformers import PrinterCallback

    with _without_untrue_warnings():
        trainer = PackedTrainer(
            model=model,
            args=config,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    trainer.remove_callback(PrinterCallback)
    if "seq_lengths" in train_rows.column_names:
        trainer.packed_sampler = PackedSampler(
            train_rows.with_format("arrow")["seq_lengths"].to_pylist(),
            config.world_size,
            rows_per_rank=config.per_device_train_batch_size * config.gradient_accumulation_steps,
            batch_size=config.per_device_train_batch_size,
            seed=config.seed,
        )
        trainer.add_callback(_TurnToEpoch(trainer.packed_sampler))
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


def tokens_trained(trainer: SFTTrainer) -> int:
    """Tokens that this process and its peers have trained on, padding not counted."""
    return int(
        next(
            (entry["num_tokens"] for entry in reversed(trainer.state.log_history) if "num_tokens" in entry), 0
        )
    )


# TRL 1.15 wants `attn_implementation` to be a FlashAttention, and warns of leaking documents otherwise. It
# does not know that the patched attention keeps documents apart in every backend.
_UNTRUE = ("Padding-free training is enabled, but the attention", "You are using packing, but the attention")


@contextmanager
def _without_untrue_warnings() -> Iterator[None]:
    logger = logging.getLogger("trl.trainer.sft_trainer")

    def is_true(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_UNTRUE)

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
