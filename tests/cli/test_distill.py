"""`unsloth-pack --objective distill` from end to end on a tiny model."""

import json

import pytest
from cli_runs import cut_after, losses, read_metrics
from command_options import read_options
from tables import table
from warm import torchrun

from unsloth_pack.cli import main
from unsloth_pack.run.contradictions import contradictions

FLAGS = {"objective": "distill", "max_steps": 6, "learning_rate": 0.01, "logging_steps": 1}
PARTS = ("sft_loss", "kl_loss", "teacher_entropy", "token_accuracy", "token_count")


def log_of(folder, name="loss"):
    return [line for line in read_metrics(folder)["log"] if name in line]


def assert_same(one, other, names):
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4)


@pytest.fixture
def few(rows, tmp_path):
    path = tmp_path / "few.json"
    path.write_text(json.dumps(rows[:7]))
    return str(path)


@pytest.mark.draws
def test_a_run_from_end_to_end(train, few, tmp_path):
    flags = FLAGS | {"kl_weight": 0.5, "ce_weight": 0.8, "eval_dataset": few, "eval_steps": 3}
    assert train("--sample_packing", **flags) == 0
    trained, evaluated = log_of(tmp_path / "out"), log_of(tmp_path / "out", "eval_loss")
    assert trained[0]["kl_loss"] == 0
    for prefix, lines in (("", trained), ("eval_", evaluated), ("eval_sample_", evaluated)):
        for line in lines:
            whole = 0.8 * line[f"{prefix}sft_loss"] + 0.5 * line[f"{prefix}kl_loss"]
            assert line[f"{prefix}loss"] == pytest.approx(whole, rel=1e-5)
    assert trained[-1]["kl_loss"] > 0
    assert evaluated[-1]["eval_sft_loss"] < 0.9 * trained[0]["sft_loss"]
    assert all(line["token_count"] > 0 for line in trained)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "KL from the teacher (nats a token)" in page
    assert (
        sum(line["token_count"] for line in trained)
        == read_metrics(tmp_path / "out")["summary"][0]["tokens_counted"]
    )


def test_evaluation_is_the_same_however_documents_are_batched(train, few, tmp_path):
    seen = []
    for packed in (False, True):
        out = tmp_path / str(packed)
        how = {"eval_packing": packed, "per_device_eval_batch_size": 2, "max_steps": 2, "output_dir": out}
        assert train("--sample_packing", **FLAGS | how, eval_dataset=few) == 0
        seen.append(log_of(out, "eval_loss"))
    names = [f"eval_{part}" for part in PARTS] + [f"eval_sample_{part}" for part in PARTS[:-1]]
    assert_same(*seen, names)


def test_two_processes_log_what_one_does(train, few, model, data, tmp_path):
    flags = FLAGS | {"eval_dataset": few, "max_steps": 3, "eval_steps": 3, "dtype": "float32"}
    flags |= {"max_seq_length": 128, "max_token_loss": 1, "per_device_eval_batch_size": 4}
    done = torchrun(
        *(2, "--sample_packing"),
        **flags | {"model_name": model, "dataset": data, "output_dir": tmp_path / "two"},
        gradient_accumulation_steps=1,
    )
    assert done.returncode == 0, done.stderr
    assert train("--sample_packing", **flags, gradient_accumulation_steps=2) == 0
    assert_same(log_of(tmp_path / "out"), log_of(tmp_path / "two"), ("loss", *PARTS))
    names = [f"eval_{name}" for name in ("loss", *PARTS)]
    assert_same(log_of(tmp_path / "out", "eval_loss"), log_of(tmp_path / "two", "eval_loss"), names)


def test_the_teachers(train, model, tmp_path, monkeypatch):
    """The base, the same model by its path, and the adapter that a second stage begins with, also resumed."""
    by_path, second = tmp_path / "by_path", {"init_adapter": tmp_path / "out", "max_steps": 4}
    assert train("--sample_packing", **FLAGS) == 0
    assert train("--sample_packing", **FLAGS, teacher=model, output_dir=by_path) == 0
    assert_same(log_of(tmp_path / "out")[1:], log_of(by_path)[1:], ("loss", *PARTS))
    out = {name: tmp_path / name for name in ("base", "init_adapter")}
    for teacher, folder in out.items():
        flags = FLAGS | second | {"teacher": teacher, "output_dir": folder, "save_steps": 2}
        assert train("--sample_packing", **flags, model_name=None) == 0
    of_base, of_adapter = (log_of(folder) for folder in out.values())
    assert of_base[0]["kl_loss"] > 0
    assert of_adapter[0]["kl_loss"] == 0
    assert of_adapter[-1]["kl_loss"] > 0
    cut_after(out["init_adapter"], 2)
    monkeypatch.chdir("/")
    assert main(["--resume", f"--output_dir={out['init_adapter']}"]) == 0
    again = log_of(out["init_adapter"])
    assert [line["kl_loss"] for line in again[2:]] == [line["kl_loss"] for line in of_adapter[2:]]


def test_a_folder_named_base_is_no_teacher(train, tmp_path):
    (tmp_path / "base").mkdir()
    assert train("--sample_packing", **FLAGS, save_steps=3) == 0
    cut_after(tmp_path / "out", 3)
    assert main(["--resume", f"--output_dir={tmp_path / 'out'}"]) == 0
    assert main([f"--config={tmp_path / 'out' / 'config.yaml'}", "--output_dir=again"]) == 0
    assert log_of(tmp_path / "out")[-1]["kl_loss"] == log_of(tmp_path / "again")[-1]["kl_loss"]


def test_a_teacher_changes_what_is_learned(train, tmp_path):
    assert train("--sample_packing", **FLAGS | {"kl_weight": 0}) == 0
    assert train("--sample_packing", **FLAGS | {"objective": "sft"}, output_dir=tmp_path / "sft") == 0
    assert train("--sample_packing", **FLAGS | {"kl_weight": 20}, output_dir=tmp_path / "near") == 0
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "sft"), rel=1e-4)
    assert log_of(tmp_path / "near")[-1]["kl_loss"] < log_of(tmp_path / "out")[-1]["kl_loss"] / 2


@table("flags, said", [
    ({"objective": "sft", "kl_weight": 0.2}, "kl_weight is 0.2 and objective is 'sft'; give --objective"),
    ({"kl_weight": 0, "ce_weight": 0}, "kl_weight is 0.0 and ce_weight is 0.0; give a positive one"),
    ({"tuning": "full"}, "teacher is 'base' and tuning is 'full', which leaves no base; give a model"),
    ({"bias": "all"}, "teacher is 'base' and bias is 'all', which changes the base; give a model"),
    ({"teacher": "init_adapter"}, "teacher is 'init_adapter', and the run begins with no adapter; give"),
    ({"teacher": "./missing"}, "cannot load ./missing: no such folder"),
    ({"teacher": "demo"}, "teacher 'demo' has another tokenizer, which differs in "),
    ({"target_modules": "lm_head", "lora_dropout": 0.1}, "the loss of an objective computes no logits: the"),
    ({"divergence": "kl"}, "divergence is 'kl'; it should be 'forward_kl', 'reverse_kl' or 'jsd'"),
])  # fmt: skip
def test_what_contradicts_a_teacher_is_refused(flags, said, refused):
    assert said in refused(**FLAGS | flags)


@pytest.mark.parametrize("how", ["--deepspeed=zero2", "--task=classify"])
def test_what_lacks_the_whole_head_is_refused(how):
    errors = list(map(str, contradictions(read_options(["--objective=distill", how]))))
    assert any("and objective is 'distill', which needs the whole LM head" in error for error in errors)
