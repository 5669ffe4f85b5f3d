"""`estimate`, `train --dry_run`, and what a run on a GPU says of its memory before it loads weights."""

import json

import pytest
from tiny import tiny_config

from unsloth_pack.cli import main
from unsloth_pack.config import TrainOptions, load, train_parser
from unsloth_pack.memory.estimate import CONTEXT
from unsloth_pack.report.metrics import read_config
from unsloth_pack.run import estimate as run_estimate
from unsloth_pack.run.estimate import check_memory
from unsloth_pack.run.resolve import resolve
from unsloth_pack.training.chips import Gpu

GIB = 2**30
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}


@pytest.fixture
def config_only(tmp_path):
    """The folder of a model of 1.2 billion parameters that has no weights and no tokenizer."""
    tiny_config("llama", **LARGE).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs of this process believe to be on a GPU with so many GiB."""
    return lambda gib: monkeypatch.setattr(Gpu, "here", lambda: Gpu("Test", int(gib * GIB), 1e12))


def estimated(capsys, *flags):
    assert main(["estimate", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_config_is_enough(config_only, capsys):
    flags = ["--model_name", config_only, "--max_seq_length", "256", "--packing", "--max_steps", "10"]
    whole = estimated(capsys, *flags, "--gpu", "h100")
    in_4_bits = estimated(capsys, *flags, "--gpu", "h100", "--load_in_4bit")
    assert whole["fits"]
    assert whole["updates"] == 10
    assert 0.25 < in_4_bits["bytes"]["weights"] / whole["bytes"]["weights"] < 0.27
    slower = estimated(capsys, *flags, "--gpu", "t4")
    assert slower["hours"] > 2 * whole["hours"] > 0


def test_the_data_decide_the_number_of_updates(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three four"}\n' * 60)
    flags = ["--dataset", str(tmp_path / "rows.jsonl"), "--num_train_epochs", "2", "--gpu", "l4"]
    plain = estimated(capsys, *flags, "--per_device_train_batch_size", "3")
    assert plain["updates"] == 2 * 60 / 3 / 4
    packed = estimated(capsys, *flags, "--packing", "--max_seq_length", "256")
    assert packed["updates"] < plain["updates"]
    assert packed["tokens_an_update"] > plain["tokens_an_update"]


def test_an_unknown_gpu(config_only, capsys):
    assert main(["estimate", "--model_name", config_only, "--gpu", "h1000"]) == 2
    assert "gpu is 'h1000'; give one of b200, h200" in capsys.readouterr().err


def test_what_cannot_fit_says_what_would(config_only, capsys):
    flags = ["--model_name", config_only, "--max_seq_length", "256", "--per_device_train_batch_size", "512"]
    said = estimated(capsys, *flags, "--gpu", "t4")
    assert not said["fits"]
    remedy = said["remedy"].removeprefix("give ").split()
    assert estimated(capsys, *flags, "--gpu", "t4", *remedy)["fits"]


def test_a_run_is_refused_before_its_weights_are_loaded(config_only, on_gpu, tmp_path, capsys):
    on_gpu(0.5)
    flags = ["--model_name", config_only, "--output_dir", str(tmp_path / "out")]
    assert main([*flags, "--max_seq_length", "256"]) == 2
    said = capsys.readouterr().err
    assert "weights and optimizer take 2.0 GiB" in said
    assert "and Test has 0.5 GiB; " in said
    assert not (tmp_path / "out").exists()


def test_a_run_is_warned_and_goes_on(train, on_gpu, capsys, caplog):
    on_gpu(0.002)
    assert train(max_steps=1) == 0
    assert "this run may not fit: it takes about" in caplog.text
    assert "of 0.0 GiB on Test at" in capsys.readouterr().out  # in the banner


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    assert main(["--dry_run", "--max_steps", "1", "--output_dir", str(tmp_path / "out")]) == 0
    assert "updates of" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_auto_takes_as_many_rows_of_an_update_as_surely_fit(config_only, on_gpu, capsys):
    flags = ["--model_name", config_only, "--max_seq_length", "256", "--packing", "--max_steps", "10"]
    an_update = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
    four = estimated(capsys, *flags, *an_update, "--gpu", "h100")
    for more, rows in ((1, 4), (-1, 2)):  # MiB beside what four rows need, a tenth of the estimate included
        on_gpu((1.1 * four["bytes"]["peak"] + CONTEXT + more * 2**20) / GIB)
        auto = ["--per_device_train_batch_size", "auto", "--effective_batch_size", "4"]
        chosen = estimated(capsys, *flags, *auto)
        assert chosen["tokens"] == rows * 256
        assert chosen["tokens_an_update"] == 4 * 256


def test_auto_is_one_row_on_a_cpu_and_what_it_was_at_a_resume(train, tmp_path):
    auto = {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 2}
    assert train("--sample_packing", max_steps=1, **auto) == 0
    again = ["--resume", f"--output_dir={tmp_path / 'out'}", "--per_device_train_batch_size=auto"]
    assert read_config(tmp_path / "out")["per_device_train_batch_size"] == 1
    assert resolve(load(again, train_parser())).training.per_device_train_batch_size == 1


def test_a_model_that_cannot_be_built_without_weights_trains_all_the_same(on_gpu, monkeypatch):
    def build(*_):
        raise NotImplementedError("aten::linalg_svd on the meta device")

    on_gpu(80)
    assert check_memory(TrainOptions()) is not None
    monkeypatch.setattr(run_estimate, "_build_on_meta", build)
    assert check_memory(TrainOptions()) is None
