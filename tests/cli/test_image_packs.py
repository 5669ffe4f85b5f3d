"""Packs on disk that hold images or refer to them, and what they may not have lost."""

import json
import re
import shutil

import pyarrow as pa
import pytest
import torch
from command_options import read_options
from image_runs import flags, refused, without_folder
from packs_on_disk import edit_manifest, rewrite
from prepared_runs import prepare

from unsloth_pack.cli import main


def pack(place, out, *more, code=0):
    arguments = ["pack", "--model_name", place / "model", "--dataset", place / "rows.jsonl", "--out", out]
    arguments += ["--image_folder", place / "seen", "--max_seq_length", 256, *more]
    assert main([str(each) for each in arguments]) == code


def on_packs(place, packs, out, *more):
    return without_folder(flags(place, out, "--dataset", packs, *more))


@pytest.mark.parametrize("are_paths", [False, True])
def test_packs_hold_the_rows_that_a_run_would_make(place, tmp_path, are_paths):
    wanted = prepare(read_options(flags(place, tmp_path / "out", "--max_pixels", 8192)))
    paths = ["--image_paths", "--rows_per_shard", 2] if are_paths else []
    pack(place, tmp_path / "packs", "--max_pixels", 8192, *paths)
    manifest = json.loads((tmp_path / "packs" / "packs.json").read_text())
    assert manifest["images"]["are_paths"] == are_paths
    assert (manifest["images"]["images"], manifest["images"]["most_pixels"]) == (13, 8192)
    folder = ["--image_folder", place / "seen"] if are_paths else []
    made = prepare(read_options(on_packs(place, tmp_path / "packs", tmp_path / "out", *folder)))
    assert made.train.ledger == wanted.train.ledger
    batches = zip(batches_of(made), batches_of(wanted), strict=True)
    for batch, direct in batches:
        for name in ("input_ids", "labels", "pixel_values"):
            assert torch.equal(batch[name], direct[name])
        assert batch["packed_row"].lengths == direct["packed_row"].lengths
        assert batch["image_grid_thw"] == direct["image_grid_thw"]


def batches_of(made):
    """Of the rows with images."""
    rows = made.train.rows.rename_column("images", "packed_images")
    return [made.images.collator()([row]) for row in rows if row["packed_images"]]


def without(name):
    return lambda rows: [row.pop(name) for row in rows]


def at(path, value):
    """Sets a field of the first image of the first row that has one."""

    def change(rows):
        images = next(row["images"] for row in rows if row["images"])
        images[0][path] = value

    return change


def test_packs_without_their_column_or_for_another_processor_are_refused(place, tmp_path, capsys):
    packs = tmp_path / "packs"
    pack(place, packs)
    arguments = on_packs(place, packs, tmp_path / "out")
    assert "max_pixels is 4096, and the images of" in refused(capsys, [*arguments, "--max_pixels=4096"])
    manifest = json.loads((packs / "packs.json").read_text())
    edit_manifest(packs, images=manifest["images"] | {"processor": "0" * 64})
    assert "packed for another image processor" in refused(capsys, arguments)
    with pa.ipc.open_stream(packs / "shard-00000.arrow") as stream:
        schema = stream.schema
    rewrite(packs, without("images"), schema.remove(schema.get_field_index("images")))
    manifest["images"] = None
    edit_manifest(packs, images=None)
    assert "stands for an image, and has no images; pack the data anew" in refused(capsys, arguments)


def test_paths_in_packs_that_lead_to_no_image_are_refused_before_training(place, tmp_path, capsys):
    packs, seen = tmp_path / "packs", shutil.copytree(place / "seen", tmp_path / "seen")
    pack(place, packs, "--image_paths", "--image_folder", seen)
    without = on_packs(place, packs, tmp_path / "out")
    said = refused(capsys, [*without, "--skip_broken_images"])
    assert re.search(rf"{packs}: row \d, column 'images': a relative path, .*; give image_folder", said)
    given = [*without, "--image_folder", str(seen)]
    (seen / "9-0.png").unlink()
    said = refused(capsys, given)
    assert re.search(r"row 9, column 'images': .*no file.*9-0.png'; .*or image_folder", said)
    assert batches_of(prepare(read_options([*given, "--skip_broken_images"])))
    shutil.copy(place / "seen" / "1-0.png", seen / "9-0.png")
    assert "an image that has changed since it was prepared" in refused(capsys, given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["{place}/seen/1-0.png", "../seen/1-0.png", "link.png"])
def test_no_path_in_packs_leads_out_of_the_image_folder(place, tmp_path, capsys, path):
    packs, seen = tmp_path / "packs", shutil.copytree(place / "seen", tmp_path / "in")
    pack(place, packs, "--image_paths", "--image_folder", seen)
    shutil.copytree(place / "seen", tmp_path / "seen")
    (seen / "link.png").symlink_to(place / "seen" / "1-0.png")
    rewrite(packs, at("path", path.format(place=place)))
    arguments = on_packs(place, packs, tmp_path / "out", "--skip_broken_images")
    said = refused(capsys, [*arguments, "--image_folder", str(seen)])
    assert "a path that leads out of the image folder" in said
