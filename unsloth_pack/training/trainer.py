"""TRL's trainer as a run uses it. Its configuration is in `trl_setup.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from trl import SFTConfig, SFTTrainer

from unsloth_pack.checkpoints.sharded import free_gathered
from unsloth_pack.data.rows import CHANNEL, IMAGES
from unsloth_pack.errors import InputError
from unsloth_pack.losses.distillation import TEACHER_IDS
from unsloth_pack.modules import is_read_from_peers, sharded_by
from unsloth_pack.patching.deferred_logging import hand_over_metrics
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.patching.trainer_hooks import HOOKS, RowCollator
from unsloth_pack.training.checkpoints import WholeCheckpoints, has_stopped_early, state_of
from unsloth_pack.training.distributed import AveragedGradients, gather_trained
from unsloth_pack.training.document_losses import ChannelLosses, DocumentLosses, losses_of_tokens
from unsloth_pack.training.image_rows import BROKEN, COLUMN, ImageRowCollator
from unsloth_pack.training.objective import Objective
from unsloth_pack.training.optimizers import CpuMasterWeights, InBackward, LearningRates, use_rates
from unsloth_pack.training.rollouts import LoaderOfReadyRows, RolloutStream
from unsloth_pack.training.sampling import DealtInTurn, packed_sampler
from unsloth_pack.training.streaming import RowStream, loader_of
from unsloth_pack.training.token_columns import TokenColumnCollator
from unsloth_pack.training.trl_setup import (
    UNTRUE,
    UNTRUE_OF_PACKS,
    adapted_head_allowed,
    kept_in_own_dtype,
    rows_of_an_update,
    silenced,
)
from unsloth_pack.training.updates import MemoryWatch, NonFiniteUpdates, RunLogging, TokenCounter, TokenCounts


class RunCallback(TrainerCallback):
    """Adapts the trainer's state of a run: where its best checkpoint is, its epoch, when it saves.

    It comes first. What stops a run comes later, and still makes a checkpoint.
    """

    def __init__(self, trainer: "RunTrainer"):
        self._trainer = trainer

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self._trainer.find_best_checkpoint(state)
        self._trainer.prepare_rollouts()

    def on_epoch_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Set the sampler's epoch. accelerate does not, if several ranks skip batches of a resumed epoch."""
        if self._trainer.packed_sampler is not None:
            self._trainer.packed_sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._trainer.row_stream is not None:  # the share that is done; a resumed trainer counts anew
            state.epoch = state.global_step / state.max_steps
        if state.global_step < state.max_steps:
            self._trainer.prepare_rollouts()
        if self._trainer.saves_later:
            control.should_save = False


class RunTrainer(SFTTrainer):
    """TRL's trainer for packed rows and long runs, which may be interrupted or meet infinite numbers.

    What is overridden of TRL and transformers is overridden here, where the order of the steps can be read.
    Its parts do the work. It logs through the hooks that a patch installs on `SFTTrainer`, with `RunLogging`.
    """

    def __init__(
        self,
        *,
        row_stream: RowStream | None = None,  # the rows, if they stream
        rates: LearningRates | None = None,
        save_delay_steps: int = 0,  # updates at the beginning that make no checkpoint
        image_rows: ImageRowCollator | None = None,  # the collator, if rows have images
        optimizer_in_backward: bool = False,  # apply each gradient in the backward pass that makes it
        masters_on_host: bool = False,  # keep float32 weights and the optimizer's state on the host
        objective: Callable[[Any], Objective] | None = None,  # of this trainer; None for TRL's loss
        channels: Sequence[str] = (),  # names of data sets, if batches have the column `CHANNEL`
        eval_channels: Sequence[str] = (),
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        self.row_stream, self.image_rows = row_stream, image_rows
        documents = None if row_stream is None else row_stream.documents
        self.rollouts = documents if isinstance(documents, RolloutStream) else None
        self._rates = rates
        self._applies_in_backward, self._masters_on_host = optimizer_in_backward, masters_on_host
        self._in_backward: InBackward | None = None  # once there is an optimizer
        self._save_delay_steps = save_delay_steps
        super().__init__(callbacks=[RunCallback(self), *callbacks], **kwargs)
        trained: Any = self.model
        patch = patch_of(trained)
        if image_rows is not None:
            self.data_collator = image_rows
        elif patch is not None:  # TRL takes no collator of a caller's beside `padding_free`
            self.data_collator = RowCollator(self.data_collator)
        if self.rollouts is not None:
            self.rollouts.model = trained
        if optimizer_in_backward and patch is not None:
            patch.capture_nothing("a graph makes all gradients at once, and they are applied as they come")
        rows: Any = self.train_dataset
        if self.rollouts is not None or channels or eval_channels or TEACHER_IDS in rows.column_names:
            self.data_collator = TokenColumnCollator(self.data_collator)
            self.args.remove_unused_columns = False  # TRL knows none of these
        self.packed_sampler = None if row_stream else packed_sampler(rows, self.args, trained, image_rows)
        self.counts = TokenCounts(trained, self.args)
        self.checkpoints = WholeCheckpoints(self.args, self.accelerator, self.counts)
        self.nonfinite_updates = NonFiniteUpdates()
        self._averaged = AveragedGradients() if self.args.world_size > 1 else None
        self.memory_watch = MemoryWatch()
        self._channels = ChannelLosses(channels)
        self._eval_channels = eval_channels
        self.unsloth_pack_logging = RunLogging(self._channels)  # the hooks on `SFTTrainer` log by it
        self.objective: Objective | None = None if objective is None else objective(self)

    # For a run

    @property
    def trained(self) -> TokenCounter:
        """Return the seconds and tokens of training, over all processes and resumptions."""
        return self.counts.trained

    @property
    def is_sharded(self) -> bool:
        """True if each process holds a part of the weights or of the optimizer's state."""
        model = cast(nn.Module, self.model)
        return self.is_deepspeed_enabled or is_read_from_peers(model) or sharded_by(model) is not None

    trained_weights = gather_trained

    @property
    def rows_trained(self) -> int:
        """Return how many rows this process has trained on."""
        return self.state.global_step * rows_of_an_update(self.args)

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
        with silenced("transformers.trainer", "The best checkpoint"):  # see `RunCallback`
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def find_best_checkpoint(self, state: TrainerState) -> bool:
        """Set the path of the checkpoint of the lowest evaluation loss, if it is there. That in the state is
        where it was written, before it was moved; of a resumed run, transformers forgets it."""
        best = Path(str(self.args.output_dir), f"checkpoint-{state.best_global_step}")
        if is_there := bool(state.best_global_step) and best.is_dir():
            state.best_model_checkpoint = str(best)
        return is_there

    def prepare_rollouts(self) -> None:
        """Generate what the next update trains on, with the weights as they are now.

        Raises:
            InputError: the first rollouts fail. Later ones stop the run after the update, with a checkpoint.
        """
        if self.rollouts is None or self.row_stream is None:
            return
        self.row_stream.fill(rows_of_an_update(self.args))
        if self.row_stream.error is not None and not self.state.global_step:
            raise self.row_stream.error

    @property
    def saves_later(self) -> bool:
        """True within the first updates, at which no checkpoint is made."""
        return self.state.global_step < min(self._save_delay_steps, self.state.max_steps)

    # Starting

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        try:
            prepared = super()._prepare_for_training(*args, **kwargs)
        except ValueError as error:
            if not self.is_deepspeed_enabled:
                raise
            message = f"DeepSpeed refuses its settings: {' '.join(str(error).split())}; correct the file"
            raise InputError(message) from error
        model = self.accelerator.unwrap_model(self.model)
        patch, how = patch_of(model), sharded_by(model)
        if patch is not None and how is not None:
            patch.adapt_to_sharding(how)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.counts.load(Path(resume_from_checkpoint))
        if self.row_stream is not None:
            self.row_stream.load(Path(resume_from_checkpoint))

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with HOOKS, self.counts.running():  # for a model that is not patched, too
            return super()._inner_training_loop(*args, **kwargs)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL's own reports its use over the network."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> Any:
        kind, options = SFTTrainer.get_optimizer_cls_and_kwargs(args, model)
        if "block_size" in options:  # of torchao's, which transformers leaves as text
            options = {**options, "block_size": int(options["block_size"])}
        return kind, options

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        if self.optimizer is None:
            if self._rates:
                use_rates(self, self.model if model is None else model, self._rates)
            self.optimizer = super().create_optimizer(model)
            if self._masters_on_host:
                self.optimizer = CpuMasterWeights(self.optimizer)
            if self._applies_in_backward:
                self._in_backward = InBackward(self.optimizer)
        return self.optimizer

    # An update

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.row_stream is None:
            return super().get_train_dataloader()
        size, pin = self.args.per_device_train_batch_size, self.args.dataloader_pin_memory
        if self.rollouts is not None:
            return LoaderOfReadyRows(self.row_stream, size, self.data_collator, self.accelerator.device)
        return loader_of(self.row_stream, size, self.data_collator, self.accelerator.device, pin)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int] | None:
        if self.packed_sampler is None:
            return super()._get_train_sampler(train_dataset)
        return DealtInTurn(self.packed_sampler)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.image_rows is None:
            return inputs
        self.counts.broken_images += inputs.pop(BROKEN, 0)
        return self.image_rows.on_device(inputs)

    def get_batch_samples(
        self, *args: Any, **kwargs: Any
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        batches, counted = super().get_batch_samples(*args, **kwargs)
        frozen = () if self.objective is None else self.objective.list_frozen_passes(batches)
        self.counts.add(batches, counted, frozen, self.accelerator)
        if self.objective is not None:
            counted = self.objective.begin_update(batches, counted)
        return batches, counted

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.memory_watch.begin(inputs["input_ids"].numel())
        if self._averaged is not None:
            self._averaged.begin(model, self.optimizer)
        try:
            loss = super().training_step(model, inputs, *args, **kwargs)
        finally:
            if self._in_backward is not None:
                self._in_backward.end()
        loss = self.nonfinite_updates.note_loss(loss)
        self.memory_watch.end()
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._channels.channel = inputs.pop(CHANNEL, None)
        if self.objective is not None:
            loss, _ = self.objective.compute_loss(model, inputs, kwargs.get("num_items_in_batch"))
        else:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._in_backward is not None and model.training:
            self._in_backward.begin(loss)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | float:
        if self._averaged is not None:
            self._averaged.average()
        return self.nonfinite_updates.judge(self, super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        if grad_norm is not None:
            norm: Tensor | float = super()._get_grad_norm(model, grad_norm)
            return norm
        if self._averaged is not None:
            self._averaged.average()
        norm = super()._get_grad_norm(model) if self._in_backward is None else self._in_backward.norm()
        return self.nonfinite_updates.judge(self, norm)

    # After an update

    def store_flos(self) -> None:
        """Store ours at a save and at the end: at every log line the host might wait for the device."""
        ends = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if ends or self.control.should_save:
            self.state.total_flos = self.trained.model_flops

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        hand_over_metrics(self)
        if metrics := self._metrics["eval"]:  # a `RunLine` counts those of updates
            metrics["num_tokens"] = [self.trained.tokens]
        super().log(logs, *args, **kwargs)

    def losses_of_evaluation(self) -> DocumentLosses:
        """Return what records the losses of one evaluation."""
        if self.objective is not None:
            return self.objective.losses_of_evaluation()
        return losses_of_tokens(channels=self._eval_channels)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._document_losses = self.losses_of_evaluation()
        output: EvalLoopOutput = super().evaluation_loop(dataloader, *args, **kwargs)
        free_gathered(cast(nn.Module, self.model))
        prefix = kwargs.get("metric_key_prefix", "eval")
        assert output.metrics is not None
        output.metrics.update(self._document_losses.means(dataloader.dataset, prefix))
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, object], *_: object, **__: object
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        with self._document_losses.noted(model, inputs):
            loss: tuple[Tensor | None, None, None] = super().prediction_step(
                model, inputs, prediction_loss_only=True
            )
        return loss

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        write = super()._save_checkpoint
        folder, step = Path(super()._get_output_dir(trial)), self.state.global_step

        def write_all() -> None:
            write(model, trial)
            if self.row_stream is not None:
                checkpoint = Path(self._get_output_dir(trial), f"checkpoint-{step}")
                self.row_stream.save(checkpoint, self.rows_trained)

        self.checkpoints.best = self.state.best_global_step if self.args.load_best_model_at_end else None
        self.checkpoints.save(folder, step, write_all)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        return not self.saves_later and super()._determine_best_metric(metrics, trial)

    def _load_best_model(self) -> None:
        if self.find_best_checkpoint(self.state):
            super()._load_best_model()

    def _get_output_dir(self, trial: object = None) -> str:
        return self.checkpoints.aside or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = self.trained_weights()
        if weights is None:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir, state_dict=weights)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: a run writes its own at its end."""


def make_trainer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    train_rows: Dataset | RowStream,
    eval_rows: Dataset | None,
    callbacks: Sequence[TrainerCallback],
    kind: type[RunTrainer] = RunTrainer,
    **options: Any,
) -> RunTrainer:
    """Make a trainer over tokenised rows, which prints nothing by itself; `options` are its own."""
    stream = train_rows if isinstance(train_rows, RowStream) else None
    has_images = options.get("image_rows") is not None
    dataset: Any = train_rows
    if stream is not None:  # TRL looks at the columns and the first row of a data set
        row = {"input_ids": [0], "labels": [0], "seq_lengths": [1]} | ({IMAGES: []} if has_images else {})
        dataset = Dataset.from_list([row]).to_iterable_dataset()
    if has_images:
        dataset, eval_rows = (rows and rows.rename_column(IMAGES, COLUMN) for rows in (dataset, eval_rows))
    untrue = (*UNTRUE, UNTRUE_OF_PACKS) if "seq_lengths" in dataset.column_names else UNTRUE
    trl = silenced("trl.trainer.sft_trainer", *untrue)
    with trl, adapted_head_allowed(model), kept_in_own_dtype(model):
        trainer = kind(
            model=model,
            args=config,
            train_dataset=dataset,
            row_stream=stream,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=callbacks,
            **options,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer
