"""`verify`, and the probe that `train` begins with."""

import json

import pytest
import torch
from cli_runs import losses, tree
from transformers import GPT2Config

from unsloth_pack.cli import main


def test_a_line_a_verdict_and_a_table(model, data, capsys):
    assert main(["verify", "--model_name", model, "--dataset", data, "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\npassed  ") == 13
    assert "FAILED" not in shown
    for said in ("llama, attention sdpa, float32", "all checks passed", "leak into gradients", "allowed"):
        assert said in shown


@pytest.mark.parametrize("mode", ["offload", "auto"])
def test_json_and_the_flags_reach_the_model(mode, model, capsys):
    command = ["verify", "--model_name", model, "--json", "--dtype", "bfloat16", "--max_seq_length", "150"]
    assert main([*command, "--use_gradient_checkpointing", mode, "--seed", "7"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["dtype"], report["checkpointing"]) == (True, "bfloat16", True)
    assert sum(report["lengths"]) <= 150
    assert all(check["passed"] for check in report["checks"])


def test_eight_bits_are_not_told_of_at_every_layer(model, caplog, capsys):
    pytest.importorskip("bitsandbytes")
    assert main(["verify", "--model_name", model, "--load_in_8bit"]) == 0
    assert "all checks passed" in capsys.readouterr().out
    assert not [record for record in caplog.records if record.name.startswith("bitsandbytes")]


def test_a_saved_adapter_is_what_is_verified(model, train, tmp_path, capsys):
    assert train("--sample_packing", max_steps=1, r=3) == 0
    ranks = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: ranks.append(getattr(module, "r", {}).get("default"))
    )
    assert main(["verify", "--model_name", str(tmp_path / "out")]) == 0
    hook.remove()
    assert set(ranks) == {3, None}
    capsys.readouterr()


def test_a_leak_is_found(model, leak, capsys):
    assert main(["verify", "--model_name", model, "--dtype", "float32"]) == 1
    shown = capsys.readouterr()
    assert "FAILED  leak into logits" in shown.out
    assert "first in layer 0" in shown.out
    assert "checks failed" in shown.out
    assert "FAILED" not in shown.err


def test_bad_input(model, tmp_path, capsys):
    GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32).save_pretrained(tmp_path / "gpt2")
    one = tmp_path / "one.json"
    one.write_text(json.dumps([{"text": "a document that stands alone"}]))
    for flags, message in [
        (
            ["--model_name", str(tmp_path / "gpt2")],
            "model type 'gpt2' has no patch; add it to",
        ),
        (["--model_name", model, "--max_seq_length", "20"], "max_seq_length is 20; give 120 or more"),
        (["--model_name", model, "--dataset", str(one)], "give two or more"),
        (
            ["--model_name", model, "--dtype", "float32", "--attn_backend", "flash"],
            "attn_backend 'flash' cannot run",
        ),
        (["--model_name", model, "--dtype", "float8"], "give one of bfloat16"),
        (["--model_name", model, "--load_in_4bit", "--load_in_fp8"], "load_in_4bit and load_in_fp8 are set"),
    ]:
        assert main(["verify", *flags]) == 2, flags
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_training_stops_at_a_leak_and_nothing_is_lost(train, leak, tmp_path, capsys):
    assert train("--no_probe", "--sample_packing", max_steps=1) == 0
    before = tree(tmp_path)
    capsys.readouterr()
    assert train("--sample_packing", "--overwrite_output_dir", max_steps=1) == 1
    error = capsys.readouterr().err
    assert "documents of a packed row see each other, with attention sdpa first in layer 0" in error
    assert error.count("\n") == 1
    assert tree(tmp_path) == before
    assert train(output_dir=tmp_path / "padded", max_steps=1) == 1  # padded batches run packed too
    assert error == capsys.readouterr().err


@pytest.mark.parametrize(("more", "looks"), [((), 1), (("--no_probe",), 0)])
def test_a_run_looks_once_or_not_at_all(more, looks, train, monkeypatch):
    from unsloth_pack.layers import leak_probe
    from unsloth_pack.verification import leaks

    seen, look = [], leak_probe.look_for_leaks
    for module in (leak_probe, leaks):
        monkeypatch.setattr(module, "look_for_leaks", lambda probed: seen.append(probed) or look(probed))
    assert train("--sample_packing", *more, max_steps=2) == 0
    assert len(seen) == looks


def test_the_probe_changes_no_bit_of_a_run(data, train, tmp_path):
    flags = {"model_name": "demo", "max_steps": 3, "lora_dropout": 0.2, "use_gradient_checkpointing": True}
    for name in ("probed", "not"):
        more = ["--no_probe"] if name == "not" else []
        assert train("--sample_packing", *more, output_dir=tmp_path / name, **flags) == 0
    assert losses(tmp_path / "probed") == losses(tmp_path / "not")
    assert len(losses(tmp_path / "not")) == 3
