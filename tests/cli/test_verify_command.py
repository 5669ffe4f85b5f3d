"""`verify`, and the probe that `train` begins with."""

import json

import pytest
from cli_runs import tree
from transformers import GPT2Config

from unsloth_pack.cli import main


def test_a_line_for_each_verdict_with_what_was_found(model, data, capsys):
    assert main(["verify", "--model_name", model, "--dataset", data, "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\npassed  ") == 16
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
        (["--model_name", model, "--dtype", "float8"], "it should be 'bfloat16'"),
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
