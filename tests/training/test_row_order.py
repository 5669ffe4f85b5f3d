"""What deals out the rows of a run hears its seed, its batches and its epochs."""

from types import SimpleNamespace

import datasets
import pytest

from unsloth_pack.packing import PackedSampler
from unsloth_pack.training.sampling import packed_sampler
from unsloth_pack.training.trainer import RunCallback

ROWS = datasets.Dataset.from_dict({"seq_lengths": [[3, 2], [4]] * 12})


def arguments(**changed):
    given = {"world_size": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "seed": 7}
    return SimpleNamespace(**{**given, **changed})


def test_the_order_is_of_the_seed():
    order = list(packed_sampler(ROWS, arguments(), model=None))
    assert order == list(PackedSampler(ROWS["seq_lengths"], rows_per_rank=6, batch_size=2, seed=7))
    assert order != list(packed_sampler(ROWS, arguments(seed=8), model=None))


def test_a_window_is_an_update():
    assert packed_sampler(ROWS, arguments(), model=None).window == 6


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_epoch_has_its_own_order(epoch):
    sampler, other = (PackedSampler(ROWS["seq_lengths"], seed=1) for _ in range(2))
    RunCallback(SimpleNamespace(packed_sampler=sampler)).on_epoch_begin(
        None, SimpleNamespace(epoch=float(epoch)), None
    )
    other.set_epoch(epoch)
    assert list(sampler) == list(other)
