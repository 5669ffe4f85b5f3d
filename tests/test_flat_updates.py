"""Trainers of patched models clip and update the adapter as one tensor, TRL's and transformers' own too."""

from contextlib import nullcontext
from unittest.mock import patch

import late_metrics_runs as runs
import pytest
import torch
from model_folder import byte_tokenizer
from peft import LoraConfig
from tiny import tiny_model
from torch.optim import AdamW
from transformers import Trainer
from trl import SFTTrainer

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW
from unsloth_pack.patching.trainer_hooks import optimizer
from unsloth_pack.patching.trainer_hooks.optimizer import update_flat, why_not_flat
from unsloth_pack.training.trainer import make_trainer

FUSED = {"optim": "adamw_torch_fused", "weight_decay": 0.1}


def trained(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def optimizer_of(trainer):
    return trainer.optimizer.optimizer


def run(folder, flat=True, kind=SFTTrainer, **options):
    with nullcontext() if flat else patch(runs.NOT_FLAT, lambda *_: "for comparison"):
        trainer = runs.sft_trainer(folder, True, kind=kind, **FUSED | options)
        log = runs.logged(trainer)
    assert isinstance(optimizer_of(trainer), FlatAdamW) == flat
    return log, trained(trainer)


@pytest.mark.parametrize("clip", [0.05, 1e3, 0.0], ids=["clipped", "below", "not clipped"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_trls_own_trainer_trains_the_same(accumulation, clip, tmp_path):
    options = {"accumulation": accumulation, "max_grad_norm": clip}
    (log, weights), (expected_log, expected) = (run(tmp_path, flat, **options) for flat in (True, False))
    assert len(log) == len(expected_log) > 4
    for line, right in zip(log, expected_log, strict=True):
        assert line == pytest.approx(right, rel=1e-4)
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, atol=1e-4)


def test_the_optimizer_takes_one_tensor(tmp_path):
    """Every step: nothing on the way turns the gradients into many again."""
    seen = []

    class Watched(SFTTrainer):
        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            seen.append(len(optimizer_of(self).flat_weights()))
            return norm

    run(tmp_path, kind=Watched)
    assert len(seen) == 18
    assert set(seen) == {1}


def test_a_trainers_checkpoint_goes_on_with_adamw(tmp_path):
    run(tmp_path / "flat", save_strategy="steps", save_steps=8)
    _, expected = run(tmp_path / "plain", flat=False)
    with patch(runs.NOT_FLAT, lambda *_: "for comparison"):
        resumed = runs.sft_trainer(tmp_path / "plain", True, **FUSED)
        resumed.train(resume_from_checkpoint=str(tmp_path / "flat" / "checkpoint-8"))
    assert resumed.state.global_step == 18
    assert all(torch.allclose(trained(resumed)[name], value, atol=1e-4) for name, value in expected.items())


def test_transformers_trainer(tmp_path):
    def collate(rows):
        return {name: torch.tensor([rows[0][name]]) for name in ("input_ids", "labels")}

    arguments = runs.config(tmp_path, False, num_train_epochs=1, per_device_train_batch_size=1, **FUSED)
    trainer = Trainer(runs.model(), arguments, collate, runs.rows(False), runs.rows(False, 50))
    before = trained(trainer)
    trainer.train()
    assert isinstance(optimizer_of(trainer), FlatAdamW)
    assert not any(torch.equal(before[name], value) for name, value in trained(trainer).items())


def test_an_adapter_that_the_trainer_puts_on(tmp_path):
    base = tiny_model("qwen3").unload()
    patch_model(base)
    arguments = runs.config(tmp_path, True, **FUSED)
    assert why_not_flat(arguments, base).startswith("all of the model trains")
    given = {"train_dataset": runs.rows(True), "eval_dataset": runs.rows(True, 50)}
    adapter = LoraConfig(target_modules=["q_proj"])
    trainer = SFTTrainer(base, arguments, processing_class=byte_tokenizer(), peft_config=adapter, **given)
    trainer.train()
    assert isinstance(optimizer_of(trainer), FlatAdamW)


def test_an_adapter_of_transformers_own_integration(tmp_path):
    """Which puts it into the model, without PEFT's model around it."""
    model = tiny_model("qwen3").unload()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    patch_model(model)
    trainer = runs.sft_trainer(tmp_path, True, model, **FUSED)
    trainer.train()
    assert isinstance(optimizer_of(trainer), FlatAdamW)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_other_optimizers_are_left_alone(optim, tmp_path):
    trainer = runs.sft_trainer(tmp_path, True, optim=optim)
    assert why_not_flat(trainer.args, trainer.model) == "not adamw_torch_fused"
    assert not isinstance(trainer.create_optimizer(), FlatAdamW)


def test_the_users_own_optimizer_is_left_alone(tmp_path):
    model = runs.model()
    own = AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    trainer = runs.sft_trainer(tmp_path, True, model, **FUSED)
    trainer.optimizer = own
    assert trainer.create_optimizer() is own
    trainer.train()
    assert optimizer_of(trainer) is own


@pytest.mark.parametrize("how", ["never patched", "undone"])
def test_models_that_are_not_patched(how, tmp_path):
    runs.model()  # some other model is
    model = tiny_model("qwen3")
    if how == "undone":
        patch_model(model).undo()
    trainer = runs.sft_trainer(tmp_path, False, model, **FUSED)
    assert why_not_flat(trainer.args, trainer.model) == "the model is not patched"
    assert type(trainer.create_optimizer()) is AdamW


@pytest.mark.parametrize("how", ["launched", "by hand"])
def test_sharded_weights_are_left_alone(how, tmp_path, monkeypatch):
    arguments = runs.config(tmp_path, True, **FUSED)
    trainer = make_trainer(
        runs.model(), byte_tokenizer(), arguments, runs.rows(True), runs.rows(True, 50), []
    )
    if how == "launched":
        trainer.is_fsdp_enabled = True  # as `accelerate launch` asks, which `args.fsdp` does not tell
    else:
        monkeypatch.setattr(optimizer, "sharded_by", lambda model: "tensor parallelism")
    assert type(Trainer.create_optimizer(trainer)) is AdamW


def test_methods_are_wrapped_once():
    update_flat()
    before = vars(Trainer)["create_optimizer"], vars(Trainer)["_clip_grad_norm"]
    update_flat()
    patch_model(tiny_model("qwen3"))
    assert (vars(Trainer)["create_optimizer"], vars(Trainer)["_clip_grad_norm"]) == before
