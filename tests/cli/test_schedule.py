"""Learning rates by group, their course, batch sizes, evaluations and checkpoints, from the command line."""

import json
import shutil

import pytest
import torch
from cli_runs import cut_after, losses, read_metrics
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from torch.optim import AdamW

from unsloth_pack.cli import main
from unsloth_pack.training.trainer import RunTrainer


@pytest.fixture
def groups(monkeypatch):
    """The learning rate of every parameter of the last run, by name."""
    found = {}
    create = RunTrainer.create_optimizer

    def created(self, model=None):
        made = create(self, model)
        names = {id(p): n for n, p in self.model.named_parameters()}
        for group in made.param_groups:
            found.update({names[id(p)]: (group["lr"], group["weight_decay"]) for p in group["params"]})
        found["trainer"] = self
        return made

    monkeypatch.setattr(RunTrainer, "create_optimizer", created)
    return found


def rates(groups, part):
    return {rate for name, (rate, _) in groups.items() if part in name}


def test_rates_by_group(train, groups):
    named = json.dumps({"layers.1.*lora_A": 0.5, r"mlp": 0.25})
    flags = {"learning_rate": 0.01, "lora_plus_ratio": 16, "embedding_learning_rate": 0.002}
    flags |= {"learning_rates": named, "modules_to_save": "embed_tokens", "max_steps": 1}
    assert train("--packing", **flags) == 0
    trainer = groups.pop("trainer")
    assert groups.keys() == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert rates(groups, "embed_tokens") == {0.002}
    assert rates(groups, "layers.0.self_attn.q_proj.lora_A") == {0.01}
    assert rates(groups, "layers.0.self_attn.q_proj.lora_B") == {0.16}
    assert rates(groups, "layers.1.self_attn.q_proj.lora_A") == {0.5}
    assert rates(groups, "layers.1.self_attn.q_proj.lora_B") == {0.16}
    assert rates(groups, "layers.0.mlp") == {0.25}


def test_lora_plus_is_peft_s(train, groups):
    assert train("--packing", lora_plus_ratio=16, weight_decay=0, max_steps=1) == 0
    trainer = groups.pop("trainer")
    theirs = create_loraplus_optimizer(trainer.model, AdamW, lr=0.01, loraplus_lr_ratio=16)
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    for group in theirs.param_groups:
        for parameter in group["params"]:
            assert groups[names[id(parameter)]] == (group["lr"], 0.0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"learning_rates": '{"lm_hed": 1e-4}'}, "learning_rates 'lm_hed' is 0.0001, and no weight that"),
        ({"embedding_learning_rate": 1e-4}, "embedding_learning_rate is 0.0001, and no weight that"),
        ({"effective_batch_size": 7, "per_device_train_batch_size": 2}, "and a step has 2 rows"),
        ({"effective_batch_size": 8, "gradient_accumulation_steps": 2}, "give one of them"),
        ({"lr_scheduler_kwargs": '{"floor": 1}'}, 'kwargs is {"floor": 1}, which transformers'),
        ({"lr_scheduler_type": "nope"}, "which transformers refuses"),
        ({"early_stopping_patience": 2}, "give --eval_dataset or --eval_fraction too"),
        ({"report_to": "nope"}, "report_to is 'nope', which is unknown or not installed; give one of"),
        ({"push_to_hub": "a b/c"}, "push_to_hub is 'a b/c', and nothing can be uploaded"),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "which has no warmup; leave out one"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(flags, says, refused):
    if "effective_batch_size" in flags:
        flags = {"gradient_accumulation_steps": None, **flags}
    assert says in refused(**flags)


def test_best_checkpoints_are_of_evaluations(refused, data):
    flags = {"eval_dataset": data, "load_best_model_at_end": True, "save_steps": 4, "eval_steps": 3}
    assert "transformers refuses these arguments: --load_best_model_at_end requires" in refused(**flags)


def test_push_to_hub_offline(refused, monkeypatch):
    def fails(self):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", fails)
    assert "nothing can be uploaded (no route to host); leave it out" in refused(push_to_hub="a/b")


def test_what_is_pushed(train, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("unsloth_pack.run.validate.check_hub", lambda name: None)
    monkeypatch.setattr("unsloth_pack.cli.train.upload", lambda *given: calls.append(given))
    assert train("--packing", push_to_hub="a/b", max_steps=1) == 0
    assert calls == [(tmp_path / "out", "a/b")]


def logged(folder, name):
    return [line[name] for line in read_metrics(folder)["log"] if name in line]


def test_the_course_of_the_rate(train, tmp_path):
    flags = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 0.004}'}
    flags |= {"warmup_ratio": 0.25, "max_steps": 8, "learning_rate": 0.01}
    assert train("--packing", **flags) == 0
    course = logged(tmp_path / "out", "learning_rate")
    assert course[0] == 0
    assert max(course) == pytest.approx(0.01)
    assert course.index(max(course)) == 2
    assert 0.004 <= course[-1] < 0.0055


def test_effective_batch_size(train, tmp_path):
    flags = {"effective_batch_size": 6, "per_device_train_batch_size": 2}
    assert train("--packing", gradient_accumulation_steps=None, max_steps=1, **flags) == 0
    assert read_metrics(tmp_path / "out")["config"][0]["options"]["gradient_accumulation_steps"] == 3


def test_evaluations_and_checkpoints_at_their_updates(train, data, tmp_path):
    flags = {"eval_dataset": data, "eval_steps": 3, "save_steps": 1, "save_delay_steps": 5, "max_steps": 7}
    assert train("--packing", max_token_loss=1, **flags) == 0
    log = read_metrics(tmp_path / "out")["log"]
    assert [line["step"] for line in log if "eval_loss" in line][:2] == [3, 6]
    assert sorted(path.name for path in tmp_path.glob("out/checkpoint-*")) == ["checkpoint-6", "checkpoint-7"]
    early = tmp_path / "early"
    assert train("--packing", output_dir=early, save_steps=2, save_delay_steps=100, max_steps=4) == 0
    assert [path.name for path in early.glob("checkpoint-*")] == [
        "checkpoint-4"
    ]  # the last is none too early


@pytest.fixture
def worse(monkeypatch):
    """Evaluation losses that get worse from the third on."""
    from unsloth_pack.training.document_losses import DocumentLosses

    values = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.1])
    monkeypatch.setattr(DocumentLosses, "means", lambda *_: {"eval_loss": next(values)})


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_early_stopping_and_the_best_model(train, data, worse, tmp_path):
    flags = {"eval_dataset": data, "eval_steps": 1, "max_steps": 8, "max_token_loss": 1}
    assert train("--packing", "--load_best_model_at_end", early_stopping_patience=3, **flags) == 0
    out = tmp_path / "out"
    assert max(losses(out)) == 5  # the best is of update 2; three evaluations follow
    kept = sorted(path.name for path in out.glob("checkpoint-*"))
    assert "checkpoint-2" in kept
    best, last = adapter(out / "checkpoint-2"), adapter(out / "checkpoint-5")
    assert all(torch.equal(best[name], weight) for name, weight in adapter(out).items())
    assert not all(torch.equal(last[name], weight) for name, weight in adapter(out).items())


@pytest.mark.parametrize("best", ["--load_best_model_at_end=true", "--load_best_model_at_end=false"])
def test_early_stopping_goes_on_where_a_run_was_killed(best, train, refused, data, worse, tmp_path, caplog):
    flags = {"eval_dataset": data, "eval_steps": 1, "save_steps": 1, "max_steps": 8, "max_token_loss": 1}
    whole = tmp_path / "whole"
    assert train("--packing", best, output_dir=whole, early_stopping_patience=3, **flags) == 0
    for step in (4, 5):  # two of three evaluations later, and where early stopping has ended it
        killed = tmp_path / str(step)
        shutil.copytree(whole, killed)
        cut_after(killed, step)
        assert main(["--resume", f"--output_dir={killed}"]) == 0
        assert losses(killed) == losses(whole)
        assert max(losses(killed)) == 5
        assert "best checkpoint" not in caplog.text
        assert all(torch.equal(adapter(whole)[name], weight) for name, weight in adapter(killed).items())
    says = refused(command=["--resume", f"--output_dir={whole}"])
    assert "is complete after 5 updates" in says
