"""`--report_to`: each tracker gets the curves, options, figures and files of a run, without a network."""

import json
from pathlib import Path

import pytest

from unsloth_pack.cli import main

pytestmark = [pytest.mark.extras, pytest.mark.draws, pytest.mark.usefixtures("one_thread")]
FILES = {"report.html", "metrics.jsonl", "README.md"}


@pytest.fixture
def train(model_folder, tmp_path, monkeypatch):
    """Trains on a mixture of two data sets, and returns the summary of the run."""
    monkeypatch.chdir(tmp_path)
    for name, letter in (("math", "a"), ("code", "b")):
        rows = [{"instruction": letter * n, "output": letter * 2 * n} for n in range(3, 20)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))

    def run(tracker):
        given = [f"--model_name={model_folder}", '--dataset=["math.json", "code.json"]', "--sample_packing"]
        given += ["--max_seq_length=128", "--dtype=float32", "--max_steps=2", f"--report_to={tracker}"]
        assert main(["train", *given, "--output_dir=out"]) == 0
        lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["kind"] == "summary"
        return lines[-1]

    return run


def test_tensorboard(train, tmp_path):
    pytest.importorskip("tensorboard")
    summary = train("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tmp_path / "out" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss/math")] == [1, 2]
    assert events.Scalars("run/last_loss")[0].value == pytest.approx(summary["last_loss"])
    assert 0 < events.Scalars("run/fill")[0].value <= 1
    assert events.Scalars("run/ledger/rows_read")[0].value == 34
    assert events.Images("packed_row")
    options, files = (events.Tensors(f"{name}/text_summary")[0] for name in ("options", "files"))
    assert b"math.json" in options.tensor_proto.string_val[0]
    assert b"report.html" in files.tensor_proto.string_val[0]


def test_mlflow(train, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    summary = train("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "loss/code")] == [1, 2]
    assert run.data.metrics["run/last_loss"] == pytest.approx(summary["last_loss"])
    assert run.data.metrics["run/ledger/rows_read"] == 34
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == FILES | {"packed_row.png", "options.json"}
    options = client.download_artifacts(run.info.run_id, "options.json", str(tmp_path))
    assert json.loads(Path(options).read_text())["max_steps"] == 2


def test_wandb(train, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    summary = train("wandb")
    run = wandb.run
    assert run.config["options"]["max_steps"] == 2
    assert run.summary["run/last_loss"] == pytest.approx(summary["last_loss"])
    assert run.summary["train/loss/math"] > 0
    assert list((tmp_path / "wandb").rglob("packed_row*.png"))
    wandb.finish()
    (log,) = (tmp_path / "wandb").rglob("*.wandb")
    assert all(name.encode() in log.read_bytes() for name in FILES)


def test_trackio(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read once, when it is imported
    pytest.importorskip("trackio")
    summary = train("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("huggingface")
    logs = SQLiteStorage.get_logs("huggingface", run)
    assert [log["train/loss/math"] > 0 for log in logs if "train/loss/math" in log] == [True, True]
    (last,) = [log for log in logs if "run/last_loss" in log]
    assert last["run/last_loss"] == pytest.approx(summary["last_loss"])
    assert "packed_row" in last
    (artifact,) = SQLiteStorage.list_artifacts("huggingface")
    assert artifact["type"] == "report"
