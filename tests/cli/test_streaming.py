"""`train --streaming`: the rows of a run that is stopped and resumed are those of one that never was."""

import gzip
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from cli_runs import losses, read_metrics

from unsloth_pack.cli import main
from unsloth_pack.training.trainer import RunTrainer


@pytest.fixture
def lines(rows, tmp_path):
    """The rows as a compressed file of lines."""
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


FLAGS = {"max_steps": 7, "gradient_accumulation_steps": 2, "lora_dropout": 0.3, "num_proc": 2}


@pytest.fixture
def seen(monkeypatch):
    """The rows of every micro-batch, since the last `clear`."""
    step, rows = RunTrainer.training_step, []

    def noting(self, model, inputs, *more):
        rows.append(inputs["input_ids"].flatten().tolist())
        return step(self, model, inputs, *more)

    monkeypatch.setattr(RunTrainer, "training_step", noting)
    return rows


@pytest.fixture
def little_at_a_time(monkeypatch):
    """Blocks of a few rows, few documents that wait."""
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 300)
    monkeypatch.setattr("unsloth_pack.data.streaming._FIRST_ROWS", 5)
    monkeypatch.setattr("unsloth_pack.training.streaming._BUFFER", 6)


@pytest.fixture
def terminated_at(monkeypatch):
    """Sends this process SIGTERM in an update."""

    def at(update):
        step = RunTrainer.training_step

        def ending(self, *arguments):
            if self.state.global_step == update - 1 and not ended:
                ended.append(os.kill(os.getpid(), signal.SIGTERM))
            return step(self, *arguments)

        ended = []
        monkeypatch.setattr(RunTrainer, "training_step", ending)

    return at


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    return {"lines": tmp_path_factory.mktemp("whole") / "rows.jsonl.gz"}


@pytest.fixture
def whole(wholes, train, lines, seen, little_at_a_time):
    """A run that is never stopped: its data, its folder, and the rows that it saw. It runs once."""
    if "rows" not in wholes:
        wholes["lines"].write_bytes(lines.read_bytes())
        wholes["folder"] = wholes["lines"].with_name("out")
        assert train("--streaming", dataset=wholes["lines"], output_dir=wholes["folder"], **FLAGS) == 0
        wholes["rows"] = seen[:]
    seen.clear()
    return SimpleNamespace(**wholes)


def adapter_bytes(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("update", "workers"), [(1, 1), (3, 3), (6, 2)])
def test_a_run_that_was_stopped_sees_the_rows_of_one_that_never_was(
    update, workers, train, whole, seen, terminated_at, tmp_path
):
    """To the bit: rows, losses, adapter and counts; whatever the number of workers."""
    cut = tmp_path / "cut"
    terminated_at(update)
    assert train("--streaming", dataset=whole.lines, output_dir=cut, **FLAGS) == 143
    assert [path.name for path in cut.glob("checkpoint-*")] == [f"checkpoint-{update}"]
    assert main(["--resume", f"--output_dir={cut}", f"--num_proc={workers}"]) == 0
    assert seen == whole.rows
    assert len(seen) == 7 * 2
    assert losses(cut) == losses(whole.folder)
    assert adapter_bytes(cut) == adapter_bytes(whole.folder)
    summaries = [read_metrics(folder)["summary"][0] for folder in (whole.folder, cut)]
    for name in ("ledger", "stream", "epochs", "tokens_trained", "tokens_counted"):
        assert summaries[0][name] == summaries[1][name]
    epochs = [
        {line["step"]: line["epoch"] for line in read_metrics(folder)["log"]}
        for folder in (whole.folder, cut)
    ]
    assert epochs[0] == epochs[1]


def test_a_row_that_cannot_be_trained_on_stops_it_with_a_checkpoint(
    train, rows, little_at_a_time, seen, capsys, tmp_path
):
    """And with the row corrected, the run goes on as if it had always been so."""
    path, whole, cut = tmp_path / "rows.jsonl", tmp_path / "whole", tmp_path / "cut"
    good = "".join(json.dumps(row) + "\n" for row in rows[:15])
    last = {"instruction": "a", "output": "b"}
    flags = FLAGS | {"dataset": path, "max_steps": 18, "gradient_accumulation_steps": 1}
    path.write_text(good + json.dumps(last) + "\n")
    assert train("--streaming", output_dir=whole, **flags) == 0
    rows_of_whole = seen[:]
    seen.clear()
    path.write_text(good + json.dumps(last | {"output": None}) + "\n")
    assert train("--streaming", output_dir=cut, **flags) == 1
    (checkpoint,) = cut.glob("checkpoint-*")
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{path}: row 15, column 'output': expected a string, got None" in said
    assert f"{checkpoint.name} is whole, go on with: unsloth-pack --resume" in said
    path.write_text(good + json.dumps(last) + "\n")
    assert main(["--resume", f"--output_dir={cut}"]) == 0
    assert seen == rows_of_whole
    assert adapter_bytes(cut) == adapter_bytes(whole)


ENDING = """
import sys
from unsloth_pack import cli
from unsloth_pack.data import streaming

streaming._BYTES, streaming._FIRST_ROWS = 300, 5
kept, exit_of = [], cli._exit_of
cli._exit_of = lambda error: kept.append(error) or exit_of(error)  # as a notebook keeps the last error
print(cli.main(sys.argv[1:]), bool(kept), flush=True)
"""


def test_python_ends_though_an_error_holds_on_to_the_stream(rows, model, tmp_path):
    path, good = tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(good + '{"instruction": "a", "output": 5}\n')
    flags = {"model_name": model, "dataset": path, "output_dir": tmp_path / "out", "max_steps": 5000}
    flags |= {"num_proc": 2, "max_seq_length": 256, "gradient_accumulation_steps": 1}
    arguments = ["--streaming", *(f"--{name}={value}" for name, value in flags.items())]
    done = warm.code(ENDING, *arguments)
    assert "column 'output': expected a string, got 5" in done.stderr
    assert done.stdout.splitlines()[-1].endswith("True")


@pytest.mark.parametrize("change", ["data", "length"])
def test_a_checkpoint_of_other_data_is_refused(change, train, lines, rows, terminated_at, capsys, tmp_path):
    terminated_at(2)
    assert train("--streaming", dataset=lines, **FLAGS) == 143
    if change == "data":
        with gzip.open(lines, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows[1:])
    else:
        (tmp_path / "out" / "checkpoint-2" / "stream_0.safetensors").write_bytes(b"cut")
    capsys.readouterr()
    assert main(["--resume", f"--output_dir={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("is not what the run began with" if change == "data" else "checkpoint-2") in said


def test_two_processes_share_the_stream_and_resume_it(model, lines, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = FLAGS | {"model_name": model, "dataset": lines, "output_dir": whole, "max_seq_length": 144}
    flags |= {"max_steps": 9, "save_steps": 5, "num_proc": 1}
    program = Path(__file__).with_name("streaming_rank.py")
    done = warm.torchrun(2, whole, cut, "--streaming", program=program, **flags)
    assert done.returncode == 0, done.stderr
    seen = [
        [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1)] for folder in (whole, cut)
    ]
    for of_whole, of_cut in zip(*seen, strict=True):
        assert of_cut == of_whole[-len(of_cut) :]
        assert len(of_cut) == 4 * 2
        assert len(of_whole) == 9 * 2
    of_first_pass = [{str(row) for row in of_rank[:10]} for of_rank in seen[0]]
    assert not of_first_pass[0] & of_first_pass[1]
    assert adapter_bytes(cut) == adapter_bytes(whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_steps": None}, "streaming is true, which needs another option; give --max_steps"),
        ({"sample_packing": "false"}, "sample_packing is false and streaming is true, which packs"),
        ({"dataset": "no/*.jsonl"}, "no/*.jsonl: no file matches it"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(flags, message, refused):
    assert message in refused("--streaming", **flags)
