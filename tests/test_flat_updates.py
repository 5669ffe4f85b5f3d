"""Trainers of patched models clip and update the adapter as one tensor: a run's, TRL's and transformers'."""

from contextlib import nullcontext
from unittest.mock import patch

import late_metrics_runs as runs
import pytest
import torch
from peft import LoraConfig
from tiny import tiny_model
from torch.optim import AdamW
from transformers import Trainer, default_data_collator

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW
from unsloth_pack.patching import trainer_hooks
from unsloth_pack.patching.trainer_hooks import why_not_flat

FUSED = {"optim": "adamw_torch_fused", "weight_decay": 0.1}
LORA = LoraConfig(target_modules=["q_proj"])


def trained(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def optimizer_of(trainer):
    return trainer.optimizer.optimizer


def flat_or_not(flat):
    return nullcontext() if flat else patch(runs.NOT_FLAT, lambda *_: "for comparison")


def run(folder, flat=True, make=runs.sft_trainer, checkpoint=None, **options):
    with flat_or_not(flat):
        trainer = make(folder, True, **FUSED | options)
        log = runs.logged(trainer, checkpoint)
    optimizer = optimizer_of(trainer)
    assert (isinstance(optimizer, FlatAdamW) and optimizer._flat is not None) == flat
    return log, trained(trainer)


def assert_close(weights, expected):
    assert all(torch.allclose(weights[name], value, atol=1e-4) for name, value in expected.items())


both_trainers = pytest.mark.parametrize("make", [runs.run_trainer, runs.sft_trainer])


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.05), (3, 1e3), (1, 0.0)])
@both_trainers
def test_training_is_the_same(make, accumulation, clip, tmp_path):
    options = {"make": make, "accumulation": accumulation, "max_grad_norm": clip}
    (log, weights), (expected_log, expected) = (run(tmp_path, flat, **options) for flat in (True, False))
    assert len(log) == len(expected_log) > 4
    for line, right in zip(log, expected_log, strict=True):
        assert line == pytest.approx(right, rel=1e-4)
    assert_close(weights, expected)


@pytest.mark.parametrize("was_flat", [True, False])
@pytest.mark.parametrize("goes_on_flat", [True, False])
@both_trainers
def test_training_goes_on_from_its_checkpoint(make, was_flat, goes_on_flat, tmp_path):
    options = {"make": make, "save_strategy": "steps", "save_steps": 8}
    _, whole = run(tmp_path / "whole", goes_on_flat, make)
    run(tmp_path / "first", was_flat, **options)
    _, resumed = run(tmp_path / "again", goes_on_flat, make, str(tmp_path / "first" / "checkpoint-8"))
    assert_close(resumed, whole)
    if was_flat == goes_on_flat:
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def of_transformers(folder):
    arguments = runs.config(folder, True, eval_strategy="no", **FUSED)
    return Trainer(runs.model(), arguments, default_data_collator, runs.rows(False))


def with_an_adapter_of_the_trainer(folder):
    model = tiny_model("qwen3").unload()
    patch_model(model)
    assert why_not_flat(runs.config(folder, True, **FUSED), model).startswith("all of the model trains")
    return runs.sft_trainer(folder, True, trained=model, peft_config=LORA, **FUSED)


def with_an_adapter_inside_the_model(folder):
    """By transformers' own integration, without PEFT's model around it."""
    model = tiny_model("qwen3").unload()
    model.add_adapter(LORA)
    patch_model(model)
    return runs.sft_trainer(folder, True, trained=model, **FUSED)


@pytest.mark.parametrize(
    "trainer_of", [of_transformers, with_an_adapter_of_the_trainer, with_an_adapter_inside_the_model]
)
def test_other_ways_to_train_an_adapter(trainer_of, tmp_path):
    trainer = trainer_of(tmp_path)
    before = trained(trainer)
    trainer.train()
    assert isinstance(optimizer_of(trainer), FlatAdamW)
    assert not any(torch.equal(before[name], value) for name, value in trained(trainer).items())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"optim": "adamw_torch"}, "not adamw_torch_fused"),
        ({"optim": "sgd"}, "not adamw_torch_fused"),
        ({"optim": "adafactor"}, "not adamw_torch_fused"),
        ("never patched", "the model is not patched"),
        ("undone", "the model is not patched"),
        ("sharded by accelerate launch", None),  # `args.fsdp` does not show it
        ("sharded by hand", None),
        ("the user's own optimizer", None),
    ],
    ids=str,
)
def test_what_is_left_alone(change, why, tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    patch = patch_model(tiny_model("qwen3") if change == "never patched" else model)
    if change == "undone":
        patch.undo()
    trainer = runs.sft_trainer(
        tmp_path, True, trained=model, **FUSED | (change if isinstance(change, dict) else {}), max_steps=1
    )
    own = AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    if change == "the user's own optimizer":
        trainer.optimizer = own
    if change == "sharded by accelerate launch":
        trainer.is_fsdp_enabled = True
    if change == "sharded by hand":
        monkeypatch.setattr(trainer_hooks, "DTensor", torch.nn.Parameter)
    assert why_not_flat(trainer.args, trainer.model) == why
    created = trainer.create_optimizer()
    assert not isinstance(created, FlatAdamW)
    assert (created is own) == (change == "the user's own optimizer")
