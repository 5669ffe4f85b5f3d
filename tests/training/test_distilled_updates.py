"""Trainers that distil: the parts of the loss in their logs, over all processes, and warnings."""

import late_metrics_runs as runs
import pytest
import torch
from device_reads import ON_THE_HOST, Reads
from model_folder import byte_tokenizer
from tables import table
from tiny import tiny_model

from unsloth_pack import patch_model
from unsloth_pack.errors import InputError
from unsloth_pack.patching import trainer_hooks
from unsloth_pack.patching.deferred_logging import logging_of
from unsloth_pack.training.distill import DistillTrainer, make_teacher

N_LABELS = sum(sum(label != -100 for label in row["labels"][1:]) for row in runs.rows(False))


def notebook_trainer(folder, packed, **options):
    distils = {name: options.pop(name) for name in ("teacher", "kl_weight", "ce_weight") if name in options}
    trained = options.pop("model", None) or runs.model()
    return DistillTrainer(
        trained,
        runs.config(folder, packed, **options),
        train_dataset=runs.rows(packed),
        eval_dataset=runs.rows(packed, 50),
        processing_class=byte_tokenizer(),
        **distils,
    )


def assert_parts_make_the_loss(lines, kl_weight, prefix="", ce_weight=1.0):
    assert lines
    for line in lines:
        whole = ce_weight * line[f"{prefix}sft_loss"] + kl_weight * line[f"{prefix}kl_loss"]
        assert line[f"{prefix}loss"] == pytest.approx(whole, rel=1e-5)
        assert line[f"{prefix}kl_loss"] > 0
        assert line[f"{prefix}teacher_entropy"] > 0
        assert 0 <= line[f"{prefix}token_accuracy"] <= 1


@pytest.mark.parametrize("packed", [True, False])
def test_a_run_logs_the_parts_of_its_loss(packed, tmp_path):
    log = runs.log_of(
        runs.run_trainer, tmp_path, packed, kl_weight=0.5, accumulation=3, logging_steps=1, max_grad_norm=0.1
    )
    trained, evaluated = ([line for line in log if name in line] for name in ("loss", "eval_loss"))
    assert_parts_make_the_loss(trained, 0.5)
    assert_parts_make_the_loss(evaluated, 0.5, "eval_")
    assert_parts_make_the_loss(
        [
            {name.replace("_sample", ""): x for name, x in line.items() if "sample" in name}
            for line in evaluated
        ],
        *(0.5, "eval_"),
    )
    assert not {"entropy", "mean_token_accuracy"} & trained[0].keys()
    n_updates = len(trained) // 2  # of an epoch
    in_all = sum(line["token_count"] for line in trained[:n_updates])
    assert in_all == (N_LABELS if not packed else sum(labels_of(row) for row in runs.rows(True)))


def labels_of(row):
    starts = torch.tensor([0, *row["seq_lengths"][:-1]]).cumsum(0)
    labels = torch.tensor(row["labels"]).index_fill(0, starts, -100)
    return int((labels != -100).sum())


def test_the_log_is_over_all_processes(tmp_path):
    variants = [{"packed": True, "kl_weight": 0.5, "logging_steps": 1}]
    variants.append(variants[0] | {"on_a_gpu": True})
    log, late = runs.logs_on_two_processes(tmp_path, variants)
    assert log == late
    trained = [line for line in log if "loss" in line]
    assert_parts_make_the_loss([line for line in trained if line["epoch"] % 1], 0.5)  # then a row comes again


def name_parts(trainer):
    """As a step does."""
    names = ("token_count", "sft_loss", "kl_loss", "teacher_entropy", "token_accuracy")
    trainer.distillation.loss.values = dict.fromkeys(names)


def test_parts_are_means_over_the_labels_of_all_processes(tmp_path):
    trainer, metrics = notebook_trainer(tmp_path, True), {}
    name_parts(trainer)
    sums = torch.tensor([[[1.0, 2, 0, 1, 0], [4, 2, 2, 1, 4]], [[5, 6, 8, 3, 1], [0, 0, 0, 0, 0]]])
    logging_of(trainer).put_metrics(trainer, metrics, sums, 40)
    assert metrics == {
        "sft_loss": [1.0],
        "kl_loss": [1.0],
        "teacher_entropy": [0.5],
        "token_accuracy": [0.5],
        "token_count": [10.0],
        "num_tokens": [40],
    }


def test_no_step_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_hooks.PatchedTraining, "on_optimizer_step", lambda *_, **__: None)
    runs.run_trainer(tmp_path, True, reads := Reads(), kl_weight=0.5, accumulation=2).train()
    assert reads.functions
    assert not reads.functions - ON_THE_HOST


def test_a_notebook_trains_and_evaluates(tmp_path):
    trainer = notebook_trainer(tmp_path, True, kl_weight=0.5, ce_weight=0.2, logging_steps=1)
    log = runs.logged(trainer)
    trained = [line for line in log if "loss" in line]
    assert sum(line["token_count"] == 0 for line in trained) == 2  # a row of each epoch has no label
    assert all(line["loss"] == line["sft_loss"] == 0 for line in trained if not line["token_count"])
    assert_parts_make_the_loss([line for line in trained if line["token_count"]], 0.5, ce_weight=0.2)
    evaluated = [line for line in log if "eval_loss" in line]
    assert [line["eval_token_count"] for line in evaluated] == [evaluated[0]["eval_token_count"]] * len(
        evaluated
    )
    assert all(line["eval_kl_loss"] > 0 for line in evaluated)
    assert evaluated[-1]["eval_sft_loss"] < evaluated[0]["eval_sft_loss"]
    base = trainer.model.get_base_model()
    assert base.training_loss.__name__ == "cross_entropy"  # as before: the trainer's alone is another


@table("sums, said", [
    (float("nan"), "kl_loss is nan about update 0"),
    (5.0, "kl_loss jumps to 0.5 about update 0, from at most 0.1 in the 8 log lines before"),
    (2.0, None),
])  # fmt: skip
def test_a_divergence_that_jumps_is_warned_of(sums, said, tmp_path, caplog):
    caplog.clear()
    trainer = notebook_trainer(tmp_path, True)
    name_parts(trainer)
    put = logging_of(trainer).put_metrics
    for total in (0.0, 0.2, *[1.0] * 6, sums):  # of ten labels
        put(trainer, {}, torch.tensor([[[10.0, 20.0, total, 1.0, 3.0]]]), 0)
    messages = [record.getMessage() for record in caplog.records if "kl_loss" in record.getMessage()]
    assert messages == [] if said is None else said in messages[0]


def full():
    model = tiny_model("qwen3", lora={"tuning": "full"})
    patch_model(model)
    return model


def with_biases():
    model = tiny_model("qwen2", lora={"bias": "all"})
    patch_model(model)
    return model


def other_vocabulary():
    model = tiny_model("llama", vocab_size=300)
    patch_model(model)
    return model


def itself():
    model = runs.model()
    return {"model": model, "teacher": model.get_base_model()}


@table("options, message", [
    (itself, "teacher is the model that trains; give 'base' or 'init_adapter', or load another"),
    (lambda: {"kl_weight": 0, "ce_weight": 0}, "kl_weight is 0 and ce_weight 0; give a positive one"),
    (lambda: {"model": full()}, r"teacher is 'base', and .*embed_tokens.weight of it trains"),
    (lambda: {"model": with_biases()}, r"teacher is 'base', and .*bias of it trains; give"),
    (lambda: {"teacher": other_vocabulary()}, "the teacher has 300 outputs, the model 256; take a teacher"),
    (lambda: {"teacher": tiny_model("llama")}, "a PeftModelForCausalLM is not patched; load it with"),
    (lambda: {"loss_type": "dft"}, "args name a loss of TRL's, and the teacher's is another; leave it out"),
])  # fmt: skip
def test_what_cannot_teach_is_refused(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        notebook_trainer(tmp_path, True, **options())


def test_a_model_that_trains_as_a_whole_has_a_frozen_copy_for_a_teacher(tmp_path):
    trainer = notebook_trainer(tmp_path, True, model=full(), teacher="init_adapter", logging_steps=1)
    trained = [line for line in runs.logged(trainer) if "loss" in line]
    assert trained[0]["kl_loss"] == 0
    assert trained[-1]["kl_loss"] > 0
    assert make_teacher(trainer.model, "init_adapter")


def test_a_notebook_learns_from_what_rows_store(tmp_path):
    K, rows = 4, runs.rows(True)
    of_tokens = [len(ids) * K for ids in rows["input_ids"]]
    rows = rows.add_column("teacher_ids", [[*range(K)] * (n // K) for n in of_tokens])
    rows = rows.add_column("teacher_log_probs", [[-1.5] * n for n in of_tokens])
    config = runs.config(tmp_path, True, logging_steps=1, eval_strategy="no")
    trainer = DistillTrainer(
        runs.model(), config, train_dataset=rows, processing_class=byte_tokenizer(), teacher="stored"
    )
    trained = [line for line in runs.logged(trainer) if line.get("token_count")]
    assert trained
    assert all(line["kl_loss"] > 0.1 for line in trained)
