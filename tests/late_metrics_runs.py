"""Runs of a trainer whose metrics are read late, or by TRL's own loss, in every micro-batch."""

import os
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from datasets import Dataset
from model_folder import byte_tokenizer
from tiny import random_documents, tiny_model
from trl import SFTTrainer
from warm import two_ranks

from unsloth_pack import patch_model
from unsloth_pack.training.trainer import make_trainer, sft_config

LENGTHS = [[5, 1, 9, 3], [12, 4], [7], [2, 2, 20], [6, 6], [30, 1], [8, 3, 3], [11], [4, 17]]
TRLS_OWN = "unsloth_pack.patching.trainer_hooks.deferred_logging.reads_late"
ON_A_GPU = "unsloth_pack.patching.trainer_hooks.deferred_logging._computes_while_the_host_goes_on"
NOT_FLAT = "unsloth_pack.patching.trainer_hooks.optimizer.why_not_flat"


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
    given = {
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
    return sft_config(str(folder), padding_free=packed, dtype=torch.float32, **given | options)


def model(arch="qwen3"):
    made = tiny_model(arch)
    patch_model(made)
    return made


def logged(trainer):
    """What the trainer logged in training, without times."""
    trainer.train()
    return [
        {key: value for key, value in line.items() if not key.endswith(("runtime", "per_second"))}
        for line in trainer.state.log_history
    ]


def log_of_run(folder, packed, trls_own, arch="qwen3", flat=True, on_a_gpu=False, **options):
    arguments = config(folder, packed, **options)
    with ExitStack() as patches:
        if trls_own:
            patches.enter_context(patch(TRLS_OWN, lambda trainer: False))
        if on_a_gpu:
            patches.enter_context(patch(ON_A_GPU, lambda trainer: True))
        if not flat:
            patches.enter_context(patch(NOT_FLAT, lambda arguments, model: "for comparison"))
        return logged(
            make_trainer(model(arch), byte_tokenizer(), arguments, rows(packed), rows(packed, 50), [])
        )


def sft_trainer(folder, packed, trained=None, kind=SFTTrainer, **options):
    """TRL's own trainer, of a patched model unless another is given."""
    given = {
        "train_dataset": rows(packed),
        "eval_dataset": rows(packed, 50),
        "processing_class": byte_tokenizer(),
    }
    return kind(trained or model(), config(folder, packed, **options), **given)


def log_of_sft_trainer(folder, packed, trls_own=False, **options):
    with patch(TRLS_OWN, lambda trainer: False) if trls_own else nullcontext():
        return logged(sft_trainer(folder, packed, **options))


def in_process(rank, folder, runs):
    """Train on two processes, once for each of `runs`; process 0 writes the logs."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    logs = [log_of_run(folder, **run) for run in runs]
    if rank == 0:
        torch.save(logs, f"{folder}/logs.pt")


def logs_on_two_processes(folder, runs):
    two_ranks(in_process, str(folder), runs)
    return torch.load(f"{folder}/logs.pt")
