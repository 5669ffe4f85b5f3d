"""The files of the images of a run: broken ones, and a folder in which none lies."""

import re
import shutil

import datasets
import pytest
from image_runs import flags, prepared, refused, rows_of, write
from prepared_runs import prepare
from tiny_vision import encoded, picture

from unsloth_pack.run.resolve import read_options


@pytest.mark.parametrize("of", ["train", "eval", "stream"])
def test_a_run_of_which_every_image_is_broken_is_refused(place, tmp_path, capsys, of):
    """Before it begins, though headers and ends are whole; a broken image among others is skipped."""
    folder = shutil.copytree(place / "seen", tmp_path / "seen")
    whole = (folder / "1-0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:200] + whole[-12:])
    rows = [row | {"images": ["cut.png"]} for row in rows_of(place) if len(row["images"]) == 1]
    data = write(tmp_path / "cut.jsonl", rows)
    name = "--eval_dataset" if of == "eval" else "--dataset"
    more = ["--image_folder", folder, "--skip_broken_images", name, data]
    more += ["--streaming"] if of == "stream" else []
    said = refused(capsys, flags(place, tmp_path / "out", *more))
    assert f"nothing would be {'evaluated' if of == 'eval' else 'learned'}" in said
    assert re.search(r"such as row 0, column 'images': .*truncated.*cut.png", said)
    assert not (tmp_path / "out").exists()
    write(data, [*rows, *rows_of(place)])
    assert prepare(read_options(flags(place, tmp_path / "out", *more)))


def test_a_run_that_has_learned_nothing_is_no_success(place, tmp_path, capsys):
    """As where all images break after the run has begun."""
    folder = shutil.copytree(place / "seen", tmp_path / "seen")
    rows = write(tmp_path / "rows.jsonl", [row for row in rows_of(place) if row["images"]])
    more = ["--image_folder", folder, "--skip_broken_images", "--dataset", rows]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unsloth_pack.run.data.check_one_can_be_decoded", lambda *_: empty(folder))
        said = refused(capsys, flags(place, tmp_path / "out", *more))
    assert "no token was counted in the loss, since every document had an image" in said
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def empty(folder):
    for path in folder.iterdir():
        path.write_bytes(b"")


def test_a_folder_that_some_data_uses_is_taken(place, tmp_path, capsys):
    """Of the data to train on or to evaluate; else it is refused, but for a run that has begun with it."""
    turns = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Nobody."}]
    images = [{"bytes": encoded(picture(50, 40, i)), "path": None} for i in range(3)]
    rows = datasets.Dataset.from_dict({"messages": [turns] * 3, "image": images})
    rows.to_parquet(tmp_path / "bytes.parquet")
    given = flags(place, tmp_path / "out", "--dataset", tmp_path / "bytes.parquet")
    said = refused(capsys, given)
    assert re.search(r"image_folder is '.*seen', and no image of the data is a file; leave out", said)
    prepare(read_options([*given, "--eval_dataset", str(place / "rows.jsonl")]))
    both = f"{tmp_path / 'bytes.parquet'},{place / 'rows.jsonl'}"
    assert prepared(place, tmp_path, "--dataset", both, "--sample_limit", 2)  # which leaves the bytes alone
