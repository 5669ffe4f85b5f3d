"""TRL's trainer as a run uses it. What it is set up with is in `trl_setup.py`."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset, IterableDataset
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, TrainerState
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack.data.rows import IMAGES
from unsloth_pack.errors import InputError
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.patching.trainer_hooks.deferred_logging import hand_over_metrics
from unsloth_pack.patching.trainer_hooks.install import HOOKS
from unsloth_pack.patching.trainer_hooks.optimizer import flattened
from unsloth_pack.patching.trainer_hooks.prefetch import RowCollator
from unsloth_pack.training.checkpoints import (
    DelayedSaves,
    KeptBest,
    WholeCheckpoints,
    best_checkpoint,
    has_stopped_early,
    state_of,
    without_untrue_warning,
)
from unsloth_pack.training.counters import MemoryWatch, TokenCounter, TokenCounts
from unsloth_pack.training.cpu_master_weights import CpuMasterWeights
from unsloth_pack.training.distributed import (
    AveragedGradients,
    adapt_patch,
    gathered,
    is_sharded,
    settings_refused_in_one_line,
    use_fsdp_on_a_cpu,
)
from unsloth_pack.training.evaluation import DocumentLosses
from unsloth_pack.training.image_rows import BROKEN, COLUMN, ImageRowCollator
from unsloth_pack.training.nonfinite import NonFiniteUpdates, RunLogging
from unsloth_pack.training.optimizers import InBackward, LearningRates, grouped
from unsloth_pack.training.sampling import DealtInTurn, TurnToEpoch, packed_sampler
from unsloth_pack.training.streaming import EpochOfStream, RowStream, loader_of

# The configuration, collator and template of TRL's trainers for tokenised rows.


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


# TRL does not know that a model is patched: silence its warnings, allow the head, prevent its cast.

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


class RunTrainer(SFTTrainer):
    """TRL's trainer for packed rows and long runs, which may be interrupted or meet infinite numbers.

    What is overridden of TRL and transformers is overridden here, where the order of the steps can be read.
    Its parts do the work. It logs through the hooks that a patch installs on `SFTTrainer`, with `RunLogging`.

        packed_sampler, None if rows are not packed    sampling.py
        row_stream, None if rows do not stream         streaming.py
        counts of seconds and tokens, memory_watch     counters.py
        checkpoints, delayed_saves                     checkpoints.py
        finite_updates, log lines                      nonfinite.py
        averaged gradients, sharded weights            distributed.py
        losses of documents, in evaluations            evaluation.py
        rates of groups of weights, in_backward        optimizers.py
        float32 master weights on the host             cpu_master_weights.py
        image_rows, None if rows have no images        image_rows.py
    """

    def __init__(
        self,
        *args: Any,
        row_stream: RowStream | None = None,
        rates: LearningRates | None = None,
        save_delay_steps: int = 0,
        image_rows: ImageRowCollator | None = None,
        optimizer_in_backward: bool = False,
        masters_on_host: bool = False,
        **kwargs: Any,
    ):
        self.rates = rates or LearningRates()
        self._applies_in_backward, self._masters_on_host = optimizer_in_backward, masters_on_host
        self.in_backward: InBackward | None = None  # once there is an optimizer
        self.image_rows = image_rows
        super().__init__(*args, **kwargs)
        self.delayed_saves = DelayedSaves(save_delay_steps)
        self.add_callback(KeptBest())
        self.row_stream = row_stream
        trained: Any = self.model
        if image_rows is not None:
            self.data_collator = image_rows
        elif patch_of(trained) is not None:  # TRL takes no collator of a caller's beside `padding_free`
            self.data_collator = RowCollator(self.data_collator)
        if optimizer_in_backward and (patch := patch_of(trained)) is not None:
            patch.capture_nothing("a graph makes all gradients at once, and they are applied as they come")
        self.packed_sampler = None
        if row_stream is not None:
            self.add_callback(EpochOfStream())
        else:
            self.packed_sampler = packed_sampler(self.train_dataset, self.args, trained, image_rows)
        if self.packed_sampler is not None:
            self.add_callback(TurnToEpoch(self.packed_sampler))
        self.counts = TokenCounts()
        self.checkpoints = WholeCheckpoints(self.args, self.accelerator, self.counts)
        self.finite_updates = NonFiniteUpdates()
        self._averaged = AveragedGradients()
        self.memory_watch = MemoryWatch()
        self._document_losses = DocumentLosses()
        self.unsloth_pack_logging = RunLogging()  # the hooks on `SFTTrainer` log by it

    # What a run asks of it

    @property
    def trained(self) -> TokenCounter:
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
        if state and (state["global_step"] >= state["max_steps"] or has_stopped_early(state)):
            # killed between its last update and its end
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState(**state)
            if self.args.load_best_model_at_end:
                self._load_best_model()
            return
        if state:  # a number of updates by now, not a share of them: transformers warns of a difference
            self.args.eval_steps = state["eval_steps"]
        with without_untrue_warning():
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
        with HOOKS, self.counts.running():  # for a model that is not patched, too
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

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if self.image_rows is None:
            return inputs
        self.counts.broken_images += inputs.pop(BROKEN, 0)
        return self.image_rows.on_device(inputs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, counted = super().get_batch_samples(*args, **kwargs)
        self.counts.add(batches, counted, self.accelerator)
        return batches, counted

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.memory_watch.begin(inputs["input_ids"].numel())
        self._averaged.begin(model, self.optimizer)
        try:
            loss = super().training_step(model, inputs, *args, **kwargs)
        finally:
            if self.in_backward is not None:
                self.in_backward.end()
        loss = self.finite_updates.note_loss(loss)
        self.memory_watch.end()
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.in_backward is not None and not return_outputs:
            self.in_backward.begin(loss)
        return loss

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        made_by, options = SFTTrainer.get_optimizer_cls_and_kwargs(args, model)
        if "block_size" in options:  # of torchao's, which transformers leaves as text
            options = {**options, "block_size": int(options["block_size"])}
        return made_by, options

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            made: Any = self._optimizer_by_rates(model) if self.rates else super().create_optimizer(model)
            self.optimizer = CpuMasterWeights(made) if self._masters_on_host else made
            if self._applies_in_backward:
                self.in_backward = InBackward(self.optimizer)
        return self.optimizer

    def _optimizer_by_rates(self, model: Any) -> Any:
        trained: Any = self.model if model is None else model
        with_decay = self.get_decay_parameter_names(trained)
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.args.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in trained.named_parameters():
            if parameter.requires_grad:
                groups[name not in with_decay]["params"].append(parameter)
        made_by, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
        made = made_by(grouped(trained, groups, self.rates, self.args.learning_rate), **options)
        return flattened(self, made)

    def _clip_grad_norm(self, model: Any) -> Any:
        self._averaged.average(self.optimizer)
        return self.finite_updates.judge(self, super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)
        self._averaged.average(self.optimizer)
        norm = super()._get_grad_norm(model) if self.in_backward is None else self.in_backward.norm()
        return self.finite_updates.judge(self, norm)

    # After an update

    def store_flos(self) -> None:
        """At a save and at the end: at every log line all processes would wait for each other once more."""
        ends = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if ends or self.control.should_save:
            super().store_flos()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        hand_over_metrics(self)
        if metrics := self._metrics["eval"]:  # a `RunLine` counts those of updates
            metrics["num_tokens"] = [self.trained.tokens]
        super().log(logs, *args, **kwargs)

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

        self.checkpoints.best = self.state.best_global_step if self.args.load_best_model_at_end else None
        self.checkpoints.save(folder, step, write_all)

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        if self.delayed_saves.is_early(self.state):  # no checkpoint will be there
            return False
        return super()._determine_best_metric(metrics, trial)

    def _load_best_model(self) -> None:
        best = best_checkpoint(self.state, Path(str(self.args.output_dir)))
        if best is not None:
            self.state.best_model_checkpoint = str(best)
            super()._load_best_model()

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.checkpoints.aside or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_sharded:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir, state_dict=self.trained_weights())


def make_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    train_rows: Dataset | RowStream,
    eval_rows: Dataset | None,
    callbacks: Sequence[TrainerCallback],
    **options: Any,
) -> RunTrainer:
    """A `RunTrainer` over tokenised rows, which prints nothing by itself; `options` are its own."""
    stream = train_rows if isinstance(train_rows, RowStream) else None
    has_images = options.get("image_rows") is not None
    dataset: Any = train_rows if stream is None else _with_columns_of_rows(has_images)
    if has_images:
        dataset, eval_rows = (rows and rows.rename_column(IMAGES, COLUMN) for rows in (dataset, eval_rows))
    is_packed = "seq_lengths" in dataset.column_names
    with without_untrue_warnings(is_packed), adapted_head_allowed(model), kept_in_own_dtype(model):
        trainer = RunTrainer(
            model=model,
            args=config,
            train_dataset=dataset,
            row_stream=stream,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=list(callbacks),
            **options,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _with_columns_of_rows(has_images: bool) -> IterableDataset:
    """One row of a stream's kind. TRL looks at the columns and at the first row of what it trains on."""
    row: dict[str, list[int]] = {"input_ids": [0], "labels": [0], "seq_lengths": [1]}
    row |= {IMAGES: []} if has_images else {}
    return Dataset.from_list([row]).to_iterable_dataset()
