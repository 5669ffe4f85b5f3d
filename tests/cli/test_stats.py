"""`stats`: the numbers of `length_report` over the tokens that training would see."""

import json

import pytest

from unsloth_pack.cli import main
from unsloth_pack.packing import length_report


@pytest.fixture
def lengths(rows):
    """With a byte a token: the template's two markers, the texts and the end of the answer."""
    marks = len("[user]") + len("[assistant]") + 1
    return [marks + len(row["instruction"]) + len(row["output"]) for row in rows]


def test_json_holds_the_report(model, data, lengths, capsys):
    command = ["stats", "--model_name", model, "--dataset", data, "--json", "--pack-lengths", "64,256"]
    command += ["--world-size", "2", "--per-device-train-batch", "3", "--target-effective", "50"]
    assert main([*command, "--binsize", "16"]) == 0
    shown = json.loads(capsys.readouterr().out)
    expected = length_report(lengths, (64, 256), 2, 3, 50, 16)
    assert shown["count"] == len(lengths)
    assert shown["tokens"] == sum(lengths)
    assert (shown["min"], shown["max"], shown["median"]) == (expected.min, expected.max, expected.median)
    assert shown["histogram"] == [list(bar) for bar in expected.histogram]
    for mine, theirs in zip(shown["forecasts"], expected.forecasts, strict=True):
        assert mine["packs"] == theirs.packs
        assert mine["accumulation"] == theirs.accumulation
        assert mine["padding"] == {str(batch): share for batch, share in theirs.padding.items()}


@pytest.mark.draws
def test_the_table_and_the_picture(model, data, lengths, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    png = tmp_path / "new" / "lengths.png"
    assert main(["stats", "--model_name", model, "--dataset", data, "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    for word in (f"{len(lengths)} documents", "rows of", "2,048", "gradient accumulation", "batches of 32"):
        assert word in shown
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pack-lengths", "64,x"], "it should be a valid integer"),
        (["--image_sizes", "64"], "such as 1024x768"),
    ],
)
def test_bad_input(flags, message, model, data, capsys):
    assert main(["stats", "--model_name", model, "--dataset", data, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
