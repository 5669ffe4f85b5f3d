"""`--optimizer_in_backward`, `--masters_on_host` and `--max_grad_norm`, from the command line."""

import shutil

import pytest
import torch
from cli_runs import cut_after, losses, read_metrics
from safetensors.torch import load_file

from unsloth_pack.cli import main

FULL = {"tuning": "full", "max_grad_norm": 0, "save_steps": 2, "optim": "adamw_torch"}


def result(folder):
    """The weights, and the optimizer's state of the last checkpoint."""
    state = torch.load(folder / "checkpoint-4" / "optimizer.pt", weights_only=True)
    return load_file(folder / "model.safetensors"), state


def assert_same(one, other):
    torch.testing.assert_close(result(one), result(other), rtol=0, atol=0)


def test_gradients_applied_as_they_come_change_nothing_but_memory(train, tmp_path, capsys):
    out, plain = tmp_path / "out", tmp_path / "plain"
    flags = {**FULL, "embedding_learning_rate": 0.003}
    assert train("--packing", output_dir=plain, **flags) == 0
    capsys.readouterr()
    assert train("--packing", "--optimizer_in_backward", "--verbose", **flags) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "each weight in the backward pass, where its gradient is freed" in shown
    assert "a graph makes all gradients at once, and they are applied as they come" in shown
    assert_same(out, plain)
    assert losses(out) == losses(plain)
    norms = [[line["grad_norm"] for line in read_metrics(each)["log"][:4]] for each in (out, plain)]
    assert min(norms[0]) > 1  # and so a norm of 1 would clip
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    cut_after(out, 2)
    assert main(["--resume", f"--output_dir={out}"]) == 0
    assert_same(out, plain)


@pytest.mark.parametrize("in_backward", [True, False])
def test_masters_on_the_host_resume_exactly(train, tmp_path, capsys, in_backward):
    """Clipped and accumulated where gradients wait for the end of the backward pass."""
    out, again = tmp_path / "out", tmp_path / "again"
    flags = {**FULL, "dtype": "bfloat16", "masters_on_host": True, "optimizer_in_backward": in_backward}
    flags |= {} if in_backward else {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    assert train("--packing", **flags) == 0
    assert "float32 masters on the host" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    weights, state = result(out)
    masters = [each["master"] for each in state["state"].values()]
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert {master.dtype for master in masters} == {torch.float32}
    rounded = {master.bfloat16().sum().item() for master in masters}
    assert rounded == {weight.sum().item() for weight in weights.values()}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)
    shutil.copytree(out, again)
    cut_after(again, 2)
    assert main(["--resume", f"--output_dir={again}"]) == 0
    assert_same(again, out)


def test_masters_keep_updates_that_bfloat16_loses(train, model, tmp_path):
    before, kept = load_file(f"{model}/model.safetensors"), {}
    for masters in (True, False):
        out = tmp_path / str(masters)
        flags = {**FULL, "dtype": "bfloat16", "learning_rate": 1e-6, "warmup_steps": 0, "weight_decay": 0}
        assert train("--packing", output_dir=out, masters_on_host=masters, **flags) == 0
        kept[masters] = result(out)[1]["state"]
    start = {name: weight.bfloat16().float() for name, weight in before.items()}
    moved = [
        (state["master"] - weight).abs().max().item()
        for state in kept[True].values()
        for weight in start.values()
        if weight.shape == state["master"].shape and torch.allclose(weight, state["master"], atol=1e-5)
    ]
    assert len(moved) >= len(kept[True])
    assert 1e-6 < min(moved) < max(moved) < 4e-6
    assert all("master" not in state for state in kept[False].values())


def test_an_update_that_is_not_finite_is_left_out_as_a_whole(train, data, tmp_path, monkeypatch):
    """Its loss is infinite, which is known before the backward pass."""
    from unsloth_pack.patching import deferred_logging

    def broken(trainer, *arguments):
        loss, outputs = default_loss(trainer, *arguments)
        return (loss * torch.inf if trainer.state.global_step == 1 else loss), outputs

    default_loss = deferred_logging.default_loss
    monkeypatch.setattr(deferred_logging, "default_loss", broken)
    flags = {**FULL, "save_steps": 1, "on_nonfinite": "skip", "optimizer_in_backward": True}
    assert train("--packing", **flags, max_steps=2) == 0
    out = tmp_path / "out"
    first, second = (load_file(out / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert [line["step"] for line in read_metrics(out)["nonfinite"]] == [2]
    assert read_metrics(out)["summary"][0]["updates_left_out"] == 1


@pytest.mark.parametrize("clipped", [True, False])
def test_gradients_are_clipped_to_what_was_asked_for(train, tmp_path, clipped):
    """SGD moves the weights by as much as the gradients' norm."""
    flags = {"tuning": "full", "optim": "sgd", "max_steps": 1, "warmup_steps": 0, "weight_decay": 0}
    flags |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.25 if clipped else 0}
    for rate in (1e-3, 1e-9):
        assert train("--packing", output_dir=tmp_path / str(rate), learning_rate=rate, **flags) == 0
    after, before = (load_file(tmp_path / str(rate) / "model.safetensors") for rate in (1e-3, 1e-9))
    moved = torch.stack([(after[name] - before[name]).double().norm() for name in after]).norm().item()
    norm = read_metrics(tmp_path / "0.001")["log"][0]["grad_norm"]
    assert norm > 1
    assert moved / 1e-3 == pytest.approx(0.25 if clipped else norm, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"optimizer_in_backward": True, "effective_batch_size": 6, "gradient_accumulation_steps": None},
            "gradient_accumulation_steps is 3; give --gradient_accumulation_steps 1",
        ),
        ({"optimizer_in_backward": True, "max_grad_norm": None}, "a norm of all; give --max_grad_norm 0"),
        ({"optimizer_in_backward": True, "tuning": None}, "and tuning is 'lora', which needs little memory"),
        ({"masters_on_host": True}, "masters_on_host is set, and what trains is in float32; give --tuning"),
    ],
)
def test_what_cannot_be_right(flags, says, refused):
    assert says in refused(**{"tuning": "full", "max_grad_norm": 0, **flags})


def test_several_processes_sum_their_gradients_first(refused, monkeypatch):
    monkeypatch.setattr("unsloth_pack.run.contradictions.count_processes", lambda: 2)
    line = refused(tuning="full", max_grad_norm=0, optimizer_in_backward=True)
    assert "2 processes first sum theirs; train in one process, or leave it out" in line
