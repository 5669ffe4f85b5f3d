"""Numbers that are not finite, and memory that is not enough: noticed, named, survived."""

import json
import math
import re

import pytest
import torch
from cli_runs import losses, read_metrics
from safetensors.torch import load_file, save_file

from unsloth_pack.cli import main
from unsloth_pack.memory.advice import MemoryUse, advise

POISON = "~"  # a character whose embedding is infinite


@pytest.fixture
def poisoned(model, tmp_path, rows, monkeypatch):
    """A model and data in which one document, of 40, is not finite.

    Such weights are refused when they are loaded, so the check is left out; finite ones overflow only in half
    precision.
    """
    from pathlib import Path
    from shutil import copytree

    monkeypatch.setattr("unsloth_pack.checkpoints.loading.refuse_not_finite", lambda *_: None)
    folder = Path(copytree(model, tmp_path / "poisoned"))
    weights = load_file(folder / "model.safetensors")
    token = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][POISON]
    weights["model.embed_tokens.weight"][token] = math.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    data = tmp_path / "poisoned.json"
    rows = [dict(row) for row in rows]
    rows[23]["instruction"] = f"{POISON}abba"
    data.write_text(json.dumps(rows))
    return {"model_name": folder, "dataset": data, "max_seq_length": 256, "max_steps": 8}


def finite_weights(out):
    return all(torch.isfinite(w).all() for w in load_file(out / "adapter_model.safetensors").values())


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_update_that_is_not_finite_stops_the_run(optim, poisoned, train, tmp_path, capsys):
    """15 packed rows, two an update: the poisoned one comes within the first eight."""
    flags = poisoned | {"gradient_accumulation_steps": 2, "optim": optim}
    assert train("--sample_packing", **flags) == 1
    error, out = capsys.readouterr().err, tmp_path / "out"
    found = read_metrics(out)["nonfinite"]
    assert len(found) == 1
    step, (culprit,) = found[0]["step"], found[0]["culprits"]
    last = step + torch.cuda.is_available()  # a GPU has the next update by then
    assert f"update {step} was left out: its loss or gradient is not finite" in error
    assert f"document {culprit['document']} of row {culprit['row']}" in error
    assert culprit["text"].startswith(f"[user]{POISON}")
    assert f"checkpoint-{last} is whole, go on with: unsloth-pack --resume" in error
    assert max(losses(out)) == last
    assert losses(out)[step] is None
    assert not (out / "adapter_model.safetensors").exists()

    assert main(["--resume", f"--output_dir={out}"]) == 0
    assert list(losses(out)) == list(range(1, 9))
    assert len(read_metrics(out)["nonfinite"]) == 1
    assert finite_weights(out)


def test_weights_that_have_diverged_blame_no_document(train, monkeypatch, capsys):
    from unsloth_pack.training.trainer import RunTrainer

    step = RunTrainer.training_step

    def diverging(self, model, *more):
        if self.state.global_step == 2:
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).fill_(math.inf)
        return step(self, model, *more)

    monkeypatch.setattr(RunTrainer, "training_step", diverging)
    assert train("--sample_packing", max_seq_length=256) == 1
    error = capsys.readouterr().err
    assert "update 3 was left out" in error
    assert re.search(r"each of its \d+ documents by itself: the weights have diverged; start anew", error)
    assert "--resume" not in error  # which would go on with those weights
    assert error.count("\n") == 1


def test_the_rows_named_are_the_rows_seen(poisoned, train, tmp_path, monkeypatch):
    """Over two epochs; every update is not finite, so that each names its rows."""
    from unsloth_pack.training.trainer import RunTrainer

    seen, step = {}, RunTrainer.training_step

    def noting(self, model, inputs, *more):
        ids = inputs["input_ids"].flatten().tolist()
        seen.setdefault(self.state.global_step + 1, []).append(self.train_dataset["input_ids"].index(ids))
        return step(self, model, inputs, *more) * math.nan

    def losses_are_nan(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        return (loss[0] * math.nan, *loss[1:]) if isinstance(loss, tuple) else loss * math.nan

    compute = RunTrainer.compute_loss
    monkeypatch.setattr(RunTrainer, "training_step", noting)
    monkeypatch.setattr(RunTrainer, "compute_loss", losses_are_nan)
    flags = poisoned | {"gradient_accumulation_steps": 4, "max_steps": 8, "logging_steps": 3}
    assert train("--sample_packing", on_nonfinite="skip", **flags) == 0
    found = read_metrics(tmp_path / "out")["nonfinite"]
    assert {line["step"]: line["rows"] for line in found} == seen
    assert sum(line["culprits"] is not None for line in found) == 3
    assert all(value is None for value in losses(tmp_path / "out").values())


def test_skipping_leaves_the_update_out(poisoned, train, tmp_path, capsys):
    flags = poisoned | {"max_steps": 15, "on_nonfinite": "skip"}  # every row
    assert train("--sample_packing", **flags) == 0
    out = tmp_path / "out"
    (found,) = read_metrics(out)["nonfinite"]
    said = capsys.readouterr().out
    assert f"update {found['step']} was left out" in said
    assert "1 updates were left out" in said
    skipped = losses(out)
    assert [step for step, loss in skipped.items() if loss is None] == [found["step"]]
    assert finite_weights(out)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9}),
    ],
)
def test_an_optimizer_on_a_cpu_does_nothing_at_all(kind, options):
    from unsloth_pack.training.updates import leave_out

    weight = torch.nn.Parameter(torch.randn(64))
    optimizer = kind([weight], lr=0.1, **options)
    for bad in (False, True, False):
        before = weight.detach().clone()
        state = {name: value.clone() for name, value in optimizer.state[weight].items()}
        weight.grad = torch.full_like(weight, math.nan) if bad else torch.randn_like(weight)
        leave_out(optimizer, [weight], torch.tensor(bad))
        optimizer.step()
        assert torch.equal(before, weight) == bad
        if bad:
            assert all(torch.equal(value, optimizer.state[weight][name]) for name, value in state.items())


@pytest.mark.gpu
def test_a_fused_optimizer_on_cuda_does_nothing_without_waiting():
    from unsloth_pack.training.updates import leave_out

    weight = torch.nn.Parameter(torch.randn(64, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    before, bad = weight.detach().clone(), torch.ones((), dtype=torch.bool, device="cuda")
    weight.grad = torch.full_like(weight, math.nan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        leave_out(optimizer, [weight], bad)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(before, weight)


def test_nothing_is_read_from_the_device_between_log_lines(train, monkeypatch):
    """Whatever reads a tensor on the host goes through `take_verdicts`, once a log line."""
    from unsloth_pack.training.updates import NonFiniteUpdates

    verdicts, look = [], NonFiniteUpdates.take_verdicts

    def noting(self):
        verdicts.append(len(self._verdicts))
        return look(self)

    monkeypatch.setattr(NonFiniteUpdates, "take_verdicts", noting)
    assert train(max_steps=7, logging_steps=3) == 0
    assert [n for n in verdicts if n] == [1, 2, 3, 1]  # the first update is logged, too, and the last


def use(**known):
    defaults = {"there": 2**34, "at_rest": 2**33, "peak": 3 * 2**32, "tokens": 4096, "failed_tokens": 16384}
    return MemoryUse(**(defaults | known))


def advice(use, **flags):
    settings = {"max_seq_length": 8192, "batch_size": 1, "accumulation": 4}
    return advise(use, **(settings | {"recomputes_all": True, "quantised": False} | flags))


def test_the_remedy_is_computed():
    """8 GiB at rest of 16, a MiB a token: 7372 tokens fit in 0.95 of it."""
    assert "a step of 16,384 tokens needs about 16.00 GiB beside 8.00 GiB at rest, of 16.00 GiB" in advice(
        use()
    )
    assert "--max_seq_length 7360 (was 8192) --per_device_train_batch_size 1" in advice(use())
    assert "--use_gradient_checkpointing" not in advice(use())
    assert "give --use_gradient_checkpointing (works with --resume), or" in advice(
        use(), recomputes_all=False
    )
    several = advice(use(), batch_size=8)
    assert "--per_device_train_batch_size 3 --gradient_accumulation_steps 11" in several
    assert "--load_in_4bit" in advice(use(at_rest=63 * 2**28, peak=2**34))
    assert "smaller model" in advice(use(at_rest=63 * 2**28, peak=2**34), quantised=True)
    assert "fragments" in advice(use(failed_tokens=4096))


@pytest.mark.parametrize(("fails_at", "checkpointing"), [(1, "false"), (3, "auto")])
def test_out_of_memory(fails_at, checkpointing, train, tmp_path, monkeypatch, capsys):
    from unsloth_pack.training.trainer import RunTrainer

    compute = RunTrainer.compute_loss

    def failing(self, *args, **kwargs):
        if self.state.global_step + 1 == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return compute(self, *args, **kwargs)

    gib = 2**30
    monkeypatch.setattr("unsloth_pack.training.updates.device_memory", lambda: (8 * gib, 4 * gib))
    monkeypatch.setattr("unsloth_pack.training.updates.most_held", lambda: 8 * gib)
    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "compute_loss", failing)
        flags = {"max_seq_length": 256, "save_steps": 1, "use_gradient_checkpointing": checkpointing}
        assert train("--sample_packing", **flags) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"out of memory in update {fails_at}: a step of" in error
    assert "--use_gradient_checkpointing" in error
    out = tmp_path / "out"
    if fails_at == 1:  # what it holds and what it asked for: 8 + 2 of 8 GiB
        assert "--max_seq_length 128 (was 256)" in error
        assert "there is no checkpoint yet, start over with: unsloth-pack --resume" in error
    else:
        assert "checkpoint-2 is whole, go on with: unsloth-pack --resume" in error
    assert main(["--resume", f"--output_dir={out}", "--use_gradient_checkpointing"]) == 0
    assert list(losses(out)) == [1, 2, 3, 4]
