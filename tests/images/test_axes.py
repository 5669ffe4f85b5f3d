"""Positions on three axes equal those that transformers makes, document by document."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vision import vision_model

from unsloth_pack.packed_row.images import RowImages
from unsloth_pack.packed_row.row import PackedRow

MODELS = {name: vision_model(name).model for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
IMAGE = 9
GRIDS = st.tuples(st.just(1), st.integers(1, 6).map(lambda n: 2 * n), st.integers(1, 6).map(lambda n: 2 * n))


def axes_of(ids, grids, image, merge):
    row = PackedRow.of_lengths((len(ids),), torch.device("cpu"))
    sizes = np.array(grids, dtype=np.int64).reshape(-1, 3) // [1, merge, merge]
    return RowImages.locate(ids == image, sizes.prod(axis=1), row).axes(row, sizes)


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=150)
@given(
    grids=st.lists(GRIDS, max_size=4),
    gaps=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    first=st.booleans(),
    last=st.booleans(),
)
def test_axes_equal_those_of_transformers(name, grids, gaps, first, last):
    """Images first, last and between; one token of text at least between two, as their markers are."""
    kinds = [] if first and grids else [0] * gaps[-1]
    for place, (grid, gap) in enumerate(zip(grids, gaps, strict=False)):
        kinds += [1] * (grid[1] * grid[2] // 4)
        kinds += [] if last and place == len(grids) - 1 else [0] * gap
    kinds = np.array(kinds)
    ids = np.where(kinds, IMAGE, 3)
    theirs, _ = MODELS[name].get_rope_index(
        torch.from_numpy(ids)[None],
        torch.from_numpy(kinds)[None],
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    assert axes_of(ids, grids, IMAGE, 2).tolist() == theirs[:, 0].tolist()


def test_touching_images_lie_one_behind_the_other():
    """transformers raises here; the second image begins where text behind the first would."""
    ids = np.array([3] + [IMAGE] * 2 + [IMAGE] * 2 + [3])
    assert axes_of(ids, [(1, 2, 4), (1, 4, 2)], IMAGE, 2).tolist() == [
        [0, 1, 1, 3, 3, 5],
        [0, 1, 1, 3, 4, 5],
        [0, 1, 2, 3, 3, 5],
    ]
