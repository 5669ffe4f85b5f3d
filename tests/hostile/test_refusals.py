"""Bad input of every kind is refused in one line, with exit code 2, and nothing is written or lost."""

import json
import resource

import cases_calls
import cases_files
import cases_flags
import cases_image_flags
import cases_images
import cases_models
import cases_rows
import cases_sets
import pytest
from refusals import Case, line_of, train, tree
from tables import table

from unsloth_pack.cli import main
from unsloth_pack.data import load_rows

MODULES = (cases_files, cases_rows, cases_sets, cases_models, cases_flags, cases_calls, cases_images)
CASES = [case for module in (*MODULES, cases_image_flags) for case in module.CASES]


@table("case", CASES, ids=lambda case: case.name[:60])
def test_refused(case, place):
    line_of(case, place)


def test_a_case_that_is_fine_fails(place):
    """The judge can say no: a run that would succeed, and a line without a remedy."""
    with pytest.raises(AssertionError, match="exit code 0"):
        line_of(Case("fine", "", train(no_probe=True)), place)
    with pytest.raises(AssertionError, match="not refused"):
        line_of(Case("fine", "", lambda: load_rows("few.jsonl")), place)


@pytest.mark.parametrize(
    ("command", "prepare"),
    [
        (["pack", "--model_name=model", "--dataset=few.jsonl", "--max_seq_length=144", "--out=new"], None),
        (["merge", "--model_name=own", "--save_path=new"], cases_models.adapter()),
    ],
    ids=["pack", "merge"],
)
def test_a_full_disk(command, prepare, place):
    """A file that may not grow is what a full disk looks like to the process that writes it."""
    if prepare:
        prepare(place)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        line = line_of(Case("full", "could not be written .*too large.*; free", command), place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "/new' could" in line or "'new' could" in line


def test_lines_of_10_megabytes_are_read_whole(place):
    text = "0123456789" * 1_000_000
    (place / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "end"}))
    (place / "rows.csv").write_text(f'text\n"{text}"\nend\n')
    (place / "rows.txt").write_text(f"{text}\nend\n")
    for name in ("rows.jsonl", "rows.csv", "rows.txt"):
        assert load_rows(name)["text"][:] == [text, "end"]


def test_names_of_any_length_make_a_folder_that_can_be(place, monkeypatch):
    """The default output_dir is named after the model and the data."""
    (place / "data").mkdir()
    data = place / "data" / ("x" * 200 + " \x1b[31m\n.jsonl")
    (place / "few.jsonl").rename(data)
    assert main(train(dataset=data, output_dir=None)) == 0
    (made,) = (place / "outputs").iterdir()
    assert made.name.isprintable()
    assert len(made.name) < 130
    assert (made / "adapter_model.safetensors").is_file()
    assert {path.split("/")[0] for path in _relative(place)} == {"data", "model", "outputs"}


def test_the_name_of_a_model_does_not_steer_the_terminal(place, capsys):
    (place / "model").rename(place / "mo\x1b[31mdel")
    assert main(train(model_name="mo\x1b[31mdel")) == 0
    shown = capsys.readouterr().out
    assert r"mo\x1b[31mdel (llama, 2 layers)" in shown
    assert "\x1b" not in shown


def _relative(folder):
    return [path.removeprefix(f"{folder}/") for path in tree(folder)]
