"""`train`, `pack` and `stats` on images that are cut into tiles, or stand line by line."""

from functools import partial

import pytest
import torch
from image_runs import flags, make_place, train, without_folder
from safetensors.torch import load_file
from tiny_tiles import FAMILIES, save_tile_model

from unsloth_pack.cli import main


@pytest.fixture(scope="module", params=FAMILIES)
def place(request, tmp_path_factory):
    return make_place(tmp_path_factory.mktemp(request.param), partial(save_tile_model, name=request.param))


def test_packed_rows_train(place, tmp_path):
    trained = train(place, tmp_path / "out", "--max_seq_length=2048", "--max_steps=2")
    packs = tmp_path / "packs"
    given = flags(place, packs)[:8]
    given[given.index("--output_dir")] = "--out"
    assert main(["pack", *given, "--max_seq_length=2048"]) == 0
    assert (tmp_path / "out" / "report.html").is_file()
    on_packs = ["--max_steps=2", "--max_seq_length=2048", "--dataset", packs]
    assert main(without_folder(flags(place, tmp_path / "again", *on_packs))) == 0
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert trained.keys() == again.keys()
    assert all(torch.equal(trained[name], again[name]) for name in trained)
