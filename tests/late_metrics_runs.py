"""Runs of trainers over a few ragged rows, whose logs are compared."""

import os
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
from datasets import Dataset
from model_folder import byte_tokenizer
from tiny import random_documents, tiny_model
from trl import SFTTrainer
from warm import two_ranks

from unsloth_pack import patch_model
from unsloth_pack.losses.distillation import DistillationLoss
from unsloth_pack.training.distill import Distillation, make_teacher
from unsloth_pack.training.trainer import make_trainer
from unsloth_pack.training.trl_setup import sft_config

LENGTHS = [[5, 1, 9, 3], [12, 4], [7], [2, 2, 20], [6, 6], [30, 1], [8, 3, 3], [11], [4, 17]]
HOOKS = "unsloth_pack.patching.trainer_hooks"
TRLS_OWN, ON_A_GPU = f"{HOOKS}.deferred_logging.replaces_loss", f"{HOOKS}.deferred_logging.is_on_gpu"
NOT_FLAT = f"{HOOKS}.why_not_flat"


def rows(packed, seed=0):
    """Ragged rows, some of whose tokens have no label; in one, none has."""
    made = []
    for number, lengths in enumerate(LENGTHS):
        ids = torch.cat(random_documents(lengths, seed=seed + number))
        labels = ids.masked_fill(torch.arange(len(ids)) % 5 == 1, -100)
        if number == 3:
            labels = torch.full_like(ids, -100)
        row = {"input_ids": ids.tolist(), "labels": labels.tolist()}
        made.append(row | ({"seq_lengths": lengths} if packed else {}))
    return Dataset.from_list(made)


def config(folder, packed, accumulation=1, **options):
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 1 if packed else 2,
        "per_device_eval_batch_size": 1 if packed else 2,
        "gradient_accumulation_steps": accumulation,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-2,
    }
    return sft_config(str(folder), padding_free=packed, dtype=torch.float32, **defaults | options)


def model(arch="qwen3"):
    made = tiny_model(arch)
    patch_model(made)
    return made


def run_trainer(folder, packed, *callbacks, arch="qwen3", kl_weight=None, **options):
    """The trainer of a run; with a `kl_weight` the base is a teacher."""
    arguments, trained = config(folder, packed, **options), model(arch)
    objective = None
    if kl_weight is not None:
        loss = DistillationLoss(make_teacher(trained), kl_weight=kl_weight)
        objective = partial(Distillation, loss=loss)
    given = (trained, byte_tokenizer(), arguments, rows(packed), rows(packed, 50), [*callbacks])
    return make_trainer(*given, objective=objective)


def sft_trainer(folder, packed, *callbacks, trained=None, kind=SFTTrainer, peft_config=None, **options):
    """TRL's own trainer, of a patched model by default."""
    return kind(
        trained or model(),
        config(folder, packed, **options),
        train_dataset=rows(packed),
        eval_dataset=rows(packed, 50),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
        callbacks=[*callbacks],
    )


def logged(trainer, checkpoint=None):
    """What the trainer logged in training, without times."""
    trainer.train(resume_from_checkpoint=checkpoint)
    return [
        {key: value for key, value in line.items() if not key.endswith(("runtime", "per_second", "tflops"))}
        for line in trainer.state.log_history
    ]


def log_of(make, folder, packed, *, trls_own=False, flat=True, on_a_gpu=False, **options):
    """The log of a trainer that `run_trainer` or `sft_trainer` makes."""
    with ExitStack() as patches:
        if trls_own:
            patches.enter_context(patch(TRLS_OWN, lambda trainer: False))
        if on_a_gpu:
            patches.enter_context(patch(ON_A_GPU, lambda arguments: True))
        if not flat:
            patches.enter_context(patch(NOT_FLAT, lambda arguments, model: "for comparison"))
        return logged(make(folder, packed, **options))


def in_process(rank, folder, runs):
    """Train on two processes, once for each of `runs`; process 0 writes the logs."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    logs = [log_of(run_trainer, folder, **run) for run in runs]
    if rank == 0:
        torch.save(logs, f"{folder}/logs.pt")


def logs_on_two_processes(folder, runs):
    two_ranks(in_process, str(folder), runs)
    return torch.load(f"{folder}/logs.pt")
