"""The files of the images of a run: broken ones, and a folder in which none lies."""

import re
import shutil

import pytest
from image_runs import flags, refused, rows_of, write
from prepared_runs import prepare

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
