"""`unsloth-pack train` from end to end on a tiny model."""

import json
import math
import re
import shutil
import signal

import pytest
import torch
from cli_runs import losses, read_metrics
from command_options import read_options
from safetensors.torch import load_file

from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main
from unsloth_pack.report.callbacks import MetricsFile
from unsloth_pack.report.terminal import document_lengths
from unsloth_pack.training.checkpoints import state_of


@pytest.mark.draws
def test_a_run_from_end_to_end(train, rows, tmp_path, capsys):
    out = tmp_path / "out"
    few = tmp_path / "few.json"
    few.write_text(json.dumps(rows[:4]))
    flags = {"max_steps": 12, "eval_dataset": few, "gradient_accumulation_steps": 2}
    assert train("--packing", "--save_model", **flags) == 0

    shown = capsys.readouterr()
    for said in ("sdpa", "documents a row", "real tokens/s", "GiB of process memory", "loss", str(out.name)):
        assert said in shown.out
    assert "Warning" not in shown.err
    assert not {"\r", "\x1b"} & {*shown.out}  # it is no terminal
    banner = shown.out[: shown.out.index("└")].splitlines()
    assert len(banner) < 20
    assert max(map(len, banner)) <= 80
    assert "not fused  │ step; --verbose and report.html say why" in shown.out

    files = {path.name for path in out.iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "metrics.jsonl"}
    assert files >= {"loss.png", "lengths.png", "merged"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "merged" / "model.safetensors").is_file()
    adapter = load_file(out / "adapter_model.safetensors")
    assert any(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)

    first_line = (out / "metrics.jsonl").read_text().splitlines()[0]
    assert '"kind": "config"' in first_line
    metrics = read_metrics(out)
    options = metrics["config"][0]["options"]
    assert (options["sample_packing"], options["per_device_train_batch_size"]) == (True, 1)
    assert options["optim"].startswith("adamw_torch")
    assert [line["step"] for line in metrics["log"] if "loss" in line] == list(range(1, 13))
    assert len([line for line in metrics["log"] if "eval_loss" in line]) >= 5
    assert losses(out)[12] < 0.9 * losses(out)[1]
    summary = metrics["summary"][0]
    assert summary["tokens_per_second"] > summary["documents_per_second"] > 0
    logged = metrics["log"][-1]
    assert all(line["tflops"] > 0 for line in metrics["log"] if "loss" in line)
    assert summary["tflops"] * summary["seconds"] * 1e12 == pytest.approx(logged["total_flos"])
    assert summary["mfu"] is summary["hfu"] is None  # a CPU has no peak
    assert summary["peak_memory_bytes"] > 2**20
    assert (summary["first_loss"], summary["last_loss"]) == (losses(out)[1], losses(out)[12])


def test_evaluation_is_the_same_however_documents_are_batched(train, rows, model, tmp_path):
    few = tmp_path / "few.json"
    few.write_text(json.dumps(rows[:7]))
    flags = {"eval_dataset": few, "max_steps": 2, "max_seq_length": 128, "per_device_train_batch_size": 1}
    flags["max_token_loss"] = 1
    seen = []
    for batch, packed in ((1, False), (3, False), (1, True), (2, True)):
        out = tmp_path / f"{batch}-{packed}"
        how = {"eval_packing": packed, "per_device_eval_batch_size": batch}
        assert train("--sample_packing", output_dir=out, **how, **flags) == 0
        logs = [line for line in read_metrics(out)["log"] if "eval_loss" in line]
        seen.append([(line["eval_loss"], line["eval_sample_loss"]) for line in logs])
    assert seen[0][0] != seen[0][1]
    for others in seen[1:]:
        torch.testing.assert_close(torch.tensor(others), torch.tensor(seen[0]))

    alone = [_loss_alone(tmp_path / "1-True", row) for row in rows[:7]]
    total, counted = map(sum, zip(*alone, strict=True))
    by_hand = (total / counted, sum(loss / n for loss, n in alone) / len(alone))
    torch.testing.assert_close(torch.tensor(seen[2][-1]), torch.tensor(by_hand))


def _loss_alone(folder, row):
    """The summed loss of a row's answer under the trained model, and how many tokens it has."""
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, dtype="float32")
    FastLanguageModel.for_inference(model)
    prompt = f"[user]{row['instruction']}[assistant]"
    ids = tokenizer(prompt + row["output"])["input_ids"] + [tokenizer.eos_token_id]
    ids = torch.tensor([ids[:128]])
    n_prompt = len(tokenizer(prompt)["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, n_prompt - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, n_prompt:], reduction="sum")
    return loss.item(), ids.shape[1] - n_prompt


@pytest.mark.parametrize("layout", ["--sample_packing", "--padding_free", "--use_rslora"])  # the last: padded
def test_what_was_trained_is_the_ledger_times_the_epochs(layout, train, tmp_path, capsys):
    flags = {
        "num_train_epochs": 2,
        "max_steps": None,
        "per_device_train_batch_size": 3,
        "max_token_loss": 0.1,
    }
    assert train(layout, **flags, max_seq_length=120) == 0
    metrics = read_metrics(tmp_path / "out")
    (data,), (summary,) = metrics["data"], metrics["summary"]
    ledger, fill = data["ledger"], data["fill"]
    assert summary["epochs"] == 2
    assert summary["tokens_trained"] == 2 * fill["tokens"]
    assert summary["tokens_counted"] == 2 * ledger["tokens_counted"]
    assert (summary["tokens_padded"] > 0) == (layout == "--use_rslora")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{summary['tokens_trained']:,} trained in 2 epochs" in said
    assert f"truncated {ledger['tokens_truncated']:,} tokens of {ledger['rows_truncated']} rows" in said
    assert f"{ledger['tokens_masked_by_template']:,} masked by the template" in said


def test_verbose_says_what_is_fused_and_why_not(train, capsys):
    assert train("--verbose", max_steps=1) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for said in ("fused norms", "not fused step not captured in CUDA graphs", "one weight after another"):
        assert said in shown
    assert "--verbose" not in shown


def test_a_run_that_would_lose_much_of_its_data_is_refused(train, tmp_path, capsys, data):
    assert read_options([]).data.max_token_loss == 0.01
    assert train(max_seq_length=100) == 2
    said = capsys.readouterr().err
    longest, share = (
        int(re.search(r"give --max_seq_length (\d+)", said)[1]),
        said.split("--max_token_loss "),
    )
    assert "beyond --max_seq_length 100, " in said
    assert not (tmp_path / "out").exists()
    assert train(max_seq_length=longest - 1, max_steps=1, max_token_loss=0) == 2
    assert train(max_seq_length=longest, max_steps=1, max_token_loss=0) == 0
    assert (
        train("--overwrite_output_dir", max_seq_length=100, max_steps=1, max_token_loss=float(share[-1])) == 0
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(number, train, tmp_path, monkeypatch, capsys):
    flags = {"max_steps": 6, "lora_dropout": 0.2, "per_device_train_batch_size": 2}
    assert train(**flags, output_dir=tmp_path / "whole") == 0

    log = MetricsFile.on_log

    def log_and_signal(self, args, state, control, **more):
        log(self, args, state, control, **more)
        if state.global_step == 2:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "on_log", log_and_signal)
        assert train(**flags) == 128 + number
    assert signal.getsignal(number) is before
    out = tmp_path / "out"
    assert f"--resume --output_dir {out}" in capsys.readouterr().out
    stopped = 3 + torch.cuda.is_available()  # a GPU has the next update by the time of a log line
    assert max(losses(out)) == stopped
    assert read_metrics(out)["stopped"][0]["step"] == stopped
    state = state_of(out / f"checkpoint-{stopped}")
    assert state["global_step"] == stopped  # starting over would give the same losses

    assert main(["--resume", "--output_dir", str(out)]) == 0
    assert losses(out) == losses(tmp_path / "whole")
    assert "stopped" not in read_metrics(out)
    resumed, summary = (read_metrics(path)["summary"][0] for path in (out, tmp_path / "whole"))
    assert resumed["tokens_trained"] == summary["tokens_trained"]
    finished, whole = (load_file(path / "adapter_model.safetensors") for path in (out, tmp_path / "whole"))
    assert all((finished[name] == whole[name]).all() for name in whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_there_is_anything_to_save(number, train, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("unsloth_pack.run.data.build_data", lambda *_, **__: signal.raise_signal(number))
    before = signal.getsignal(number)
    assert train() == 128 + number
    assert signal.getsignal(number) is before
    assert capsys.readouterr().err == "unsloth-pack: interrupted before it saved anything\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_aborts_at_once(number, train, monkeypatch, capsys):
    def interrupt(self, args, state, control, **more):
        signal.raise_signal(number)
        signal.raise_signal(number)

    monkeypatch.setattr(MetricsFile, "on_log", interrupt)
    assert train() == 128 + number
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "unsloth-pack --resume --output_dir" in said


def test_resume_goes_on_from_a_saved_checkpoint_and_refuses_another_plan(finished, capsys, monkeypatch):
    out = str(finished)
    assert main(["--resume", "--output_dir", out, "--learning_rate", "1"]) == 2
    assert "learning_rate is 1.0 and was 0.01" in capsys.readouterr().err
    assert main(["--resume", "--output_dir", out]) == 2
    assert "complete after 3 updates" in capsys.readouterr().err
    shutil.rmtree(finished / "checkpoint-3")
    with monkeypatch.context() as patched:
        patched.setattr("unsloth_pack.run.folder.count_processes", lambda: 2)
        assert main(["--resume", "--output_dir", out]) == 2
    assert "had 1 processes and this one has 2, but only packed rows" in capsys.readouterr().err
    assert main(["--resume", "--output_dir", out]) == 0
    assert list(losses(finished)) == [1, 2, 3]


def test_resume_refuses_other_data(train, rows, tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert train(dataset=path, save_steps=2, max_steps=3) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    path.write_text(json.dumps(rows[:-1]))
    assert main(["--resume", "--output_dir", str(tmp_path / "out")]) == 2
    assert "rows.json is not what the run began with (rows_read was 40, is 39)" in capsys.readouterr().err
    path.write_text(json.dumps(rows))
    assert main(["--resume", "--output_dir", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_resume_refuses_data_in_another_order(flag, train, rows, tmp_path, capsys):
    """No token count differs, and yet the rows to come are others."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert train(**{flag: path}, save_steps=2, max_steps=3) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    path.write_text(json.dumps(rows[::-1]))
    assert main(["--resume", "--output_dir", str(tmp_path / "out")]) == 2
    assert "rows.json is not what the run began with (fingerprint was " in capsys.readouterr().err
    path.write_text(json.dumps(rows))
    assert main(["--resume", "--output_dir", str(tmp_path / "out")]) == 0


def test_resume_refuses_other_evaluation_data(train, rows, tmp_path, capsys):
    path = tmp_path / "heldout.json"
    path.write_text(json.dumps(rows[:9]))
    assert train(eval_dataset=path, save_steps=2, max_steps=3) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    path.write_text(json.dumps(rows[:8]))
    assert main(["--resume", "--output_dir", str(tmp_path / "out")]) == 2
    assert "heldout.json is not what the run began with (rows_read was 9, is 8)" in capsys.readouterr().err
    path.write_text(json.dumps(rows[:9]))
    assert main(["--resume", "--output_dir", str(tmp_path / "out")]) == 0


def test_overwriting_removes_links_and_not_what_they_point_to(train, finished, tmp_path):
    out = finished
    (out / "checkpoint-2").rename(tmp_path / "moved")
    (out / "checkpoint-2").symlink_to(tmp_path / "moved")
    (out / "checkpoint-latest").symlink_to("checkpoint-3")
    assert train("--overwrite_output_dir", max_steps=1) == 0
    assert list(losses(out)) == [1]
    assert not list(out.glob("checkpoint-*"))
    assert (tmp_path / "moved" / "trainer_state.json").is_file()


def test_as_many_documents_an_update_as_without_packing(model, data, tmp_path):
    from prepared_runs import prepare

    flags = {"model_name": model, "dataset": data, "output_dir": tmp_path / "out", "max_seq_length": 256}
    flags |= {"gradient_accumulation_steps": 16, "per_device_train_batch_size": 2}
    arguments = ["--sample_packing", *(f"--{name}={value}" for name, value in flags.items())]
    as_given, kept = (
        prepare(read_options([*arguments, *more])) for more in ([], ["--keep_examples_per_update"])
    )
    per_row = len(document_lengths(kept.train.rows)) / len(kept.train.rows)
    assert per_row > 2
    assert as_given.config.gradient_accumulation_steps == 16
    assert kept.config.gradient_accumulation_steps == math.ceil(32 / (2 * per_row)) < 16
