"""`train --streaming` on rows with images: the same documents, and the same rows after a stop."""

import os
import shutil
import signal

import datasets
import numpy as np
import pytest
from command_options import read_options
from image_runs import flags, prepared, rows_of, without_folder, write
from prepared_runs import prepare
from tiny_vision import encoded, picture

from unsloth_pack.cli import main
from unsloth_pack.report.metrics import read_losses
from unsloth_pack.training.trainer import RunTrainer

STREAM = ["--streaming", "--num_proc", 2]


@pytest.fixture
def little_at_a_time(monkeypatch):
    """Blocks of a few rows, few documents that wait."""
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 300)
    monkeypatch.setattr("unsloth_pack.data.streaming._FIRST_ROWS", 5)
    monkeypatch.setattr("unsloth_pack.training.streaming._BUFFER", 4)


@pytest.fixture
def seen(monkeypatch):
    """Tokens and pixels of every micro-batch, since the last `clear`."""
    step, batches = RunTrainer.training_step, []

    def noting(self, model, inputs, *more):
        pixels = inputs.get("pixel_values")
        batches.append((inputs["input_ids"].flatten().tolist(), None if pixels is None else pixels.tolist()))
        return step(self, model, inputs, *more)

    monkeypatch.setattr(RunTrainer, "training_step", noting)
    return batches


def documents(rows, n):
    """Ids, labels and what tells its images apart, of the first n documents of rows, packed or not."""
    found = []
    for row in rows:
        ends = np.cumsum(row.get("seq_lengths") or [len(row["input_ids"])]).tolist()
        images = row.get("packed_images", row.get("images", []))
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            mine = [one for one in images if (one.get("document") or 0) == number]
            told = [(one["path"], one["sha256"], one["tokens"], one["height"], one["row"]) for one in mine]
            found.append((list(row["input_ids"][start:end]), list(row["labels"][start:end]), told))
        if len(found) >= n:
            return found[:n]
    return found


@pytest.mark.parametrize("kind", ["files", "bytes"])
def test_the_documents_of_a_pass_are_those_of_the_data_read_at_once(kind, place, tmp_path, little_at_a_time):
    more = []
    if kind == "bytes":
        rows = [
            row | {"images": [{"bytes": encoded(picture(40 + 8 * n, 60, n)), "path": None}]}
            for n, row in enumerate(rows_of(place)[1::4])
        ]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        more = ["--dataset", tmp_path / "rows.parquet"]
    given = flags(place, tmp_path / "out", *more)
    at_once = prepare(read_options(without_folder(given) if kind == "bytes" else given))
    streamed = prepared(place, tmp_path, *STREAM, *more)
    expected = documents(at_once.train.rows, 1000)
    found = documents(streamed.train.rows, len(expected))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert any(told for *_, told in found)
    assert streamed.train.ledger.images > 0


def test_a_run_that_was_stopped_sees_the_rows_of_one_that_never_was(
    place, tmp_path, little_at_a_time, seen, monkeypatch
):
    """To the bit, images that wait in the checkpoint included."""
    more = [*STREAM, "--max_steps", 6, "--gradient_accumulation_steps", 2, "--dataloader_num_workers", 3]
    more += ["--eval_dataset", place / "rows.jsonl"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(flags(place, whole, *more)) == 0
    of_whole = seen[:]
    seen.clear()
    step = RunTrainer.training_step

    def ending(self, *arguments):
        if self.state.global_step == 2 and not ended:
            ended.append(os.kill(os.getpid(), signal.SIGTERM))
        return step(self, *arguments)

    ended = []
    monkeypatch.setattr(RunTrainer, "training_step", ending)
    assert main(flags(place, cut, *more)) == 143
    assert main(["--resume", f"--output_dir={cut}", "--dataloader_num_workers=1"]) == 0
    assert seen == of_whole
    assert len(seen) == 12
    assert sum(pixels is not None for _, pixels in seen) > 3
    assert read_losses(cut) == read_losses(whole)
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in (whole, cut)]
    assert weights[0] == weights[1]


def test_a_broken_image_stops_the_run_or_is_skipped(place, tmp_path, little_at_a_time, capsys, seen):
    rows = rows_of(place)
    seen_here = shutil.copytree(place / "seen", tmp_path / "seen")
    whole = (seen_here / "9-0.png").read_bytes()
    (seen_here / "9-0.png").write_bytes(whole[:60] + whole[-12:])  # it ends as a whole one does
    data = write(tmp_path / "last.jsonl", [*rows[:8] * 5, rows[9]])
    more = [*STREAM, "--image_folder", seen_here, "--dataset", data, "--max_steps", 30, "--save_steps", 4]
    assert main(flags(place, tmp_path / "out", *more)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "row 40, column 'images': an image that cannot be read (image file is truncated)" in said
    assert "checkpoint-8 is whole, go on with: unsloth-pack --resume" in said
    seen.clear()
    assert main(flags(place, tmp_path / "skipped", *more, "--skip_broken_images")) == 0
    assert len(seen) == 30
