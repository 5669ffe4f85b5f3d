"""The files of the images of a run: broken ones, and a folder in which none lies."""

import shutil

from image_runs import flags, refused, rows_of, write


def test_a_run_that_has_learned_nothing_is_no_success(place, tmp_path, capsys):
    """Headers and ends are whole, so that the images break when they are decoded."""
    folder = shutil.copytree(place / "seen", tmp_path / "seen")
    whole = (folder / "1-0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:200] + whole[-12:])
    rows = [row | {"images": ["cut.png"]} for row in rows_of(place) if len(row["images"]) == 1]
    more = [
        "--image_folder",
        folder,
        "--skip_broken_images",
        "--dataset",
        write(tmp_path / "cut.jsonl", rows),
    ]
    said = refused(capsys, flags(place, tmp_path / "out", *more))
    assert "no token was counted in the loss, since every document had an image" in said
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
