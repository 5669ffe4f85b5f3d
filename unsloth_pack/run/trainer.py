"""The trainer of a run, and its configuration from the options."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig

from unsloth_pack.config import flat
from unsloth_pack.config.options import DataOptions, ImageOptions, OutputOptions, TrainingOptions
from unsloth_pack.run.data import TrainingData
from unsloth_pack.run.optimizer import arguments_of, check_optimizer, rates_of
from unsloth_pack.run.sharding import sharding_arguments
from unsloth_pack.training.checkpoints import EarlyStopping
from unsloth_pack.training.classification import ClassificationTrainer
from unsloth_pack.training.objective import Objective
from unsloth_pack.training.trainer import RunTrainer, make_trainer
from unsloth_pack.training.trl_setup import sft_config

# Options that transformers' `TrainingArguments` take as they are.
_TRAINING_ARGUMENTS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "optim", "max_grad_norm", "weight_decay", "lr_scheduler_type", "warmup_steps", "seed"),
    *("logging_steps", "report_to", "lr_scheduler_kwargs", "neftune_noise_alpha", "load_best_model_at_end"),
)


def build_config(
    data: DataOptions, training: TrainingOptions, output: OutputOptions, dtype: torch.dtype
) -> SFTConfig:
    """Make the configuration of the trainer.

    Args:
        dtype: of the model's weights.

    Raises:
        InputError: TRL or transformers refuse an option, or the optimizer cannot be made here.
    """
    values = flat(training) | flat(output)
    arguments: dict[str, Any] = {name: values[name] for name in _TRAINING_ARGUMENTS}
    arguments |= {"max_steps": training.max_steps or -1, "num_train_epochs": training.num_train_epochs or 1.0}
    arguments |= arguments_of(training)
    arguments |= {"logging_first_step": True, "save_strategy": "no"}
    if training.warmup_ratio is not None:
        arguments["warmup_steps"] = training.warmup_ratio  # below 1, a share of all updates
    evaluates = training.eval_steps or 0.1  # a share of all updates
    if data.evaluates:
        arguments |= {"eval_strategy": "steps", "eval_steps": evaluates}
    if save_steps := output.save_steps or (training.load_best_model_at_end and evaluates):
        arguments |= {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": 2}
    if training.load_best_model_at_end or training.early_stopping_patience:
        arguments |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    if data.streaming:  # which goes on at a place of its own, without going through what is done
        arguments |= {"ignore_data_skip": True}
    config = sft_config(
        str(output.folder),
        padding_free=data.padding_free or data.sample_packing,
        dtype=dtype,
        **arguments,
        **sharding_arguments(training),
    )
    check_optimizer(config)
    return config


def build_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    data: TrainingData,
    training: TrainingOptions,
    images: ImageOptions,
    save_delay_steps: int,
    callbacks: Sequence[TrainerCallback],
    objective: Callable[[Any], Objective] | None = None,
) -> RunTrainer:
    """Make the trainer of a run; `objective` computes its loss, in place of cross-entropy."""
    own: list[TrainerCallback] = []
    if training.early_stopping_patience:
        own.append(EarlyStopping(training.early_stopping_patience))
    trainer = make_trainer(
        model,
        tokenizer,
        config,
        data.train.rows,
        data.evaluation.rows if data.evaluation else None,
        [*own, *callbacks],
        RunTrainer if data.labels is None else ClassificationTrainer,
        rates=rates_of(training, images),
        save_delay_steps=save_delay_steps,
        optimizer_in_backward=training.optimizer_in_backward,
        masters_on_host=training.masters_on_host,
        image_rows=data.images.collator() if data.images else None,
        objective=objective,
        channels=data.train.channels,
        eval_channels=data.evaluation.channels if data.evaluation else (),
    )
    trainer.nonfinite_updates.on_nonfinite = training.on_nonfinite
    return trainer
