"""Everything that knows TRL: its configuration, trainer, collator, templates and warnings."""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset, IterableDataset
from packaging.version import Version
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, TrainerState
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.errors import InputError
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.training.checkpoints import WholeCheckpoints, state_of
from unsloth_pack.training.collator import RowCollator
from unsloth_pack.training.evaluation import DocumentLosses
from unsloth_pack.training.finite_updates import FiniteUpdates
from unsloth_pack.training.flat_adamw import FlatAdamW, why_not_flat
from unsloth_pack.training.late_metrics import LateMetrics, default_loss, has_default_loss
from unsloth_pack.training.memory_watch import MemoryWatch
from unsloth_pack.training.row_order import DealtInTurn, TurnToEpoch, packed_sampler
from unsloth_pack.training.row_stream import EpochOfStream, RowStream, loader_of
from unsloth_pack.training.sharded_weights import (
    adapt_patch,
    gathered,
    is_sharded,
    settings_refused_in_one_line,
    use_fsdp_on_a_cpu,
)
from unsloth_pack.training.trained import Trained, TrainedCounts


class RunTrainer(SFTTrainer):
    """TRL's trainer for packed rows and long runs, which may be interrupted or meet infinite numbers.

    What is overridden of TRL and transformers is overridden here, where the order of the steps can be read.
    The work is done by parts that the trainer holds or calls, one a module:

        packed_sampler, None if rows are not packed   row_order.py
        row_stream, None if rows do not stream        row_stream.py
        counts, of seconds and tokens                 trained.py
        checkpoints, whole or not there               checkpoints.py
        finite_updates                                finite_updates.py
        loss and metrics, without waits               late_metrics.py
        AdamW over one tensor                         flat_adamw.py
        memory_watch                                  memory_watch.py
        document losses, in evaluations               evaluation.py
        weights shared out over processes             sharded_weights.py
    """

    def __init__(self, *args: Any, row_stream: RowStream | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.row_stream = row_stream
        trained: Any = self.model
        if patch_of(trained) is not None:  # TRL takes no collator of a caller's beside `padding_free`
            self.data_collator = RowCollator(self.data_collator)
        self.packed_sampler = None
        if row_stream is not None:
            self.add_callback(EpochOfStream())
        else:
            self.packed_sampler = packed_sampler(self.train_dataset, self.args)
        if self.packed_sampler is not None:
            self.add_callback(TurnToEpoch(self.packed_sampler))
        self.counts = TrainedCounts()
        self.checkpoints = WholeCheckpoints(self.args, self.accelerator, self.counts)
        self.finite_updates = FiniteUpdates()
        self._late_metrics = LateMetrics(self.accelerator)
        self.memory_watch = MemoryWatch()
        self._document_losses = DocumentLosses()

    # What a run asks of it

    @property
    def trained(self) -> Trained:
        """What the run has trained on, in all the processes that it took."""
        return self.counts.trained

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 or DeepSpeed trains."""
        return is_sharded(self)

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained parameters, whole, if the weights are sharded; see `gathered`."""
        return gathered(self)

    @property
    def rows_trained(self) -> int:
        """Rows that this process has trained on."""
        arguments: Any = self.args
        return self.state.global_step * rows_of_an_update(arguments)

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, from the beginning or from a whole checkpoint."""
        state = state_of(checkpoint) if checkpoint else None
        if state and state["global_step"] >= state["max_steps"]:  # killed between its last update and its end
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState(**state)
            return
        if state:  # a number of updates by now, not a share of them: transformers warns of a difference
            self.args.eval_steps = state["eval_steps"]
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card into the output folder, if there is none; a link of its name is replaced."""
        card = Path(str(self.args.output_dir)) / "README.md"
        if card.is_symlink():
            card.unlink(missing_ok=True)
        if not card.exists():
            super().create_model_card(*args, **kwargs)

    # Starting

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_a_cpu(self)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with settings_refused_in_one_line(self):
            prepared = super()._prepare_for_training(*args, **kwargs)
        adapt_patch(self)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.counts.load(Path(resume_from_checkpoint))
        if self.row_stream is not None:
            self.row_stream.load(Path(resume_from_checkpoint))

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.counts.running():
            return super()._inner_training_loop(*args, **kwargs)

    def _send_telemetry(self) -> None:
        """TRL's own reports its use over the network; this one does not."""

    # An update

    def get_train_dataloader(self) -> Any:
        if self.row_stream is None:
            return super().get_train_dataloader()
        size, pin = self.args.per_device_train_batch_size, self.args.dataloader_pin_memory
        return loader_of(self.row_stream, size, self.data_collator, self.accelerator.device, pin)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.packed_sampler is None:
            return super()._get_train_sampler(train_dataset)
        return DealtInTurn(self.packed_sampler)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, counted = super().get_batch_samples(*args, **kwargs)
        self.counts.add(batches, counted, self.accelerator)
        return batches, counted

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.memory_watch.begin(inputs["input_ids"].numel())
        loss = super().training_step(model, inputs, *args, **kwargs)
        loss = self.finite_updates.note_loss(loss)
        self.memory_watch.end()
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs or not has_default_loss(self):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = default_loss(self, model, inputs, num_items_in_batch)
        self._late_metrics.note(self._mode, outputs)
        return loss

    @property
    def _mode(self) -> str:
        """As TRL names the metrics of training and of evaluation."""
        model: Any = self.model
        return "train" if model.training else "eval"

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        made_by, options = SFTTrainer.get_optimizer_cls_and_kwargs(args, model)
        return (FlatAdamW if why_not_flat(args) is None else made_by), options

    def _clip_grad_norm(self, model: Any) -> Any:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        flat = optimizer.flat_weights() if isinstance(optimizer, FlatAdamW) else []
        if flat:
            norm = self.accelerator.clip_grad_norm_(flat, self.args.max_grad_norm)
        else:
            norm = super()._clip_grad_norm(model)
        return self.finite_updates.judge(self, norm)

    # After an update

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_save or self.state.global_step >= self.state.max_steps:
            self.control.should_log = True  # and so learn whether the updates were finite, see `log`
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        metrics = self._metrics[self._mode]
        metrics.update(self._late_metrics.read(self._mode))
        if metrics:  # TRL does not count rows that come again so that all ranks have some
            metrics["num_tokens"] = [self.trained.tokens]
        left_out = self.finite_updates.steps_left_out()
        if left_out and "loss" in logs:
            logs["loss"] = math.nan
        super().log(logs, *args, **kwargs)
        for step in left_out:
            self.finite_updates.handle(self, step)

    # An evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        self._document_losses.clear()
        outcome: Any = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        outcome.metrics.update(self._document_losses.means(dataloader.dataset, metric_key_prefix))
        return outcome

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, None, None]:
        with self._document_losses.noted(model, inputs):
            loss, *_ = super().prediction_step(model, inputs, prediction_loss_only=True)
        return loss, None, None

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        folder, step = Path(super()._get_output_dir(trial)), self.state.global_step

        def write_all() -> None:
            write(model, trial)
            if self.row_stream is not None:
                self.row_stream.save(
                    Path(self._get_output_dir(trial), f"checkpoint-{step}"), self.rows_trained
                )

        self.checkpoints.save(folder, step, write_all)

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.checkpoints.aside or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_sharded:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir, state_dict=self.trained_weights())


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


def make_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    train_rows: Dataset | RowStream,
    eval_rows: Dataset | None,
    callbacks: Sequence[TrainerCallback],
) -> RunTrainer:
    """A `RunTrainer` over tokenised rows, which prints nothing by itself."""
    stream = train_rows if isinstance(train_rows, RowStream) else None
    dataset: Any = train_rows if stream is None else _with_columns_of_rows()
    with _without_untrue_warnings(is_packed="seq_lengths" in dataset.column_names):
        trainer = RunTrainer(
            model=model,
            args=config,
            train_dataset=dataset,
            row_stream=stream,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def rows_of_an_update(config: SFTConfig) -> int:
    """Rows that one process sees between two updates of the weights."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps


def _with_columns_of_rows() -> IterableDataset:
    """One row of a stream's kind. TRL looks at the columns and at the first row of what it trains on."""
    row = {"input_ids": [0], "labels": [0], "seq_lengths": [1]}
    return Dataset.from_list([row]).to_iterable_dataset()


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


# TRL 1.15 warns of leaks unless `attn_implementation` is a FlashAttention. It does not know that the patched
# attention keeps documents apart with every backend,
_UNTRUE = ("Padding-free training is enabled, but the attention", "You are using packing, but the attention")
# nor that a row which was packed before holds several documents.
_UNTRUE_OF_PACKS = "You are using a per_device_train_batch_size of 1 with padding-free training"


@contextmanager
def _without_untrue_warnings(is_packed: bool) -> Iterator[None]:
    logger = logging.getLogger("trl.trainer.sft_trainer")
    untrue = (*_UNTRUE, *([_UNTRUE_OF_PACKS] if is_packed else []))

    def is_true(record: logging.LogRecord) -> bool:
        return not any(said in record.getMessage() for said in untrue)  # `in`: it may begin with "[RANK 0]"

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
