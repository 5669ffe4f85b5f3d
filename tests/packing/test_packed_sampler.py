"""PackedSampler: equal rows, even work, one order for any number of ranks, and exact resumption."""

import hashlib
import itertools
import json

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from tables import table
from torch.utils.data import BatchSampler

from unsloth_pack.errors import InputError
from unsloth_pack.packing import PackedSampler, plan_packs

CAPACITY = 2048


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.2, 1.1, 12_000), 1, CAPACITY).astype(int)
    return [lengths[documents].tolist() for documents in plan_packs(lengths, CAPACITY).bins]


def samplers(rows, world_size, **arguments):
    return [PackedSampler(rows, world_size, rank, **arguments) for rank in range(world_size)]


@table(("world_size", "rows_per_rank", "batch_size"), [(1, 4, 2), (3, 1, 1), (8, 4, 2)])
@table("drop_last", [False, True])
def test_every_rank_has_as_many_rows(rows, world_size, rows_per_rank, batch_size, drop_last):
    arguments = {"rows_per_rank": rows_per_rank, "batch_size": batch_size, "drop_last": drop_last}
    ranks = samplers(rows, world_size, **arguments)
    lengths = [len(sampler) for sampler in ranks]
    taken = [list(sampler) for sampler in ranks]
    window = world_size * rows_per_rank
    assert len(set(lengths)) == 1
    assert [len(t) for t in taken] == lengths
    seen = np.bincount(np.concatenate(taken).astype(int), minlength=len(rows))
    if drop_last:
        assert seen.max() == 1
        assert (seen == 0).sum() == len(rows) % window
    else:
        assert seen.min() == 1
        together = world_size * batch_size if world_size > 1 else 1
        assert seen.sum() == -(-len(rows) // together) * together


def test_the_global_order_is_the_same_for_any_number_of_ranks(rows):
    order = PackedSampler(rows, seed=7).global_order()
    assert sorted(order.tolist()) == list(range(len(rows)))
    for world_size, rows_per_rank in ((2, 8), (4, 4), (16, 1)):
        ranks = samplers(rows, world_size, rows_per_rank=rows_per_rank, seed=7, drop_last=True)
        assert np.array_equal(ranks[0].global_order(), order)
        taken = np.array([list(sampler) for sampler in ranks]).reshape(world_size, -1, rows_per_rank)
        for i in range(taken.shape[1]):
            assert sorted(taken[:, i].ravel()) == sorted(order[16 * i : 16 * (i + 1)])


def test_order_depends_on_seed_and_epoch(rows):
    sampler = PackedSampler(rows, seed=1)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler)
    assert first != list(PackedSampler(rows, seed=2))
    assert list(PackedSampler(rows, shuffle=False)) == list(range(len(rows)))


def test_an_epoch_is_none_of_another_seed():
    first, second = (PackedSampler([[1]] * 50, seed=seed) for seed in (0, 1))
    first.set_epoch(1)
    assert list(first) != list(second)


def test_work_is_evener_than_dealt_in_turn(rows):
    sampler = PackedSampler(rows, 8, rows_per_rank=8)
    squares = np.array([sum(n * n for n in row) for row in rows])
    tokens = np.array([sum(row) for row in rows])
    windows = sampler.global_order()[: len(rows) // 64 * 64].reshape(-1, 64)

    def waiting(by_rank):
        cost = 0.5 * squares[by_rank] / squares.mean() + 0.5 * tokens[by_rank] / tokens.mean()
        of_window = cost.sum(axis=2)
        return 1 - of_window.mean(axis=1).sum() / of_window.max(axis=1).sum()

    in_turn = waiting(windows.reshape(-1, 8, 8))
    spread = sampler.spread()
    assert spread.waiting < in_turn / 3
    assert spread.attention < 0.01
    assert spread.tokens < 0.01


def test_spread_by_hand():
    sampler = PackedSampler(
        [[4], [2, 2], [1, 3], [2, 1]], 2, rows_per_rank=2, shuffle=False, attention_weight=1
    )
    assert sampler.assignment().tolist() == [[0, 3], [1, 2]]  # squares 16 + 5 and 8 + 10
    spread = sampler.spread()
    assert spread.attention == pytest.approx(3 / 19.5)
    assert spread.tokens == pytest.approx(1 / 7.5)
    assert spread.waiting == pytest.approx(1 - 19.5 / 21)
    assert str(spread) == "estimated spread between ranks: attention 15.38%, tokens 13.33%, waiting 7.14%"


# ---- going on


@pytest.mark.parametrize("done", [0, 5])
def test_the_same_ranks_go_on_exactly(rows, done):
    for rank in range(3):
        sampler = PackedSampler(rows, 3, rank, rows_per_rank=4)
        sampler.set_epoch(2)
        whole = list(sampler)
        sampler = PackedSampler(rows, 3, rank, rows_per_rank=4)
        sampler.set_epoch(2)
        head = list(itertools.islice(sampler, done))
        restored = PackedSampler(rows, 3, rank, rows_per_rank=4)
        restored.load_state_dict(sampler.state_dict())
        restored.set_epoch(2)
        assert len(restored) == len(whole)
        assert head + list(restored) == whole


@table(
    ("rows", "arguments", "says"),
    [
        ([[3, 4], [2], [5]], {}, "saved with lengths="),
        ([[3, 4], [5], [2]], {"seed": 4}, "saved with seed=0 and this one has 4"),
        ([[3, 4], [5], [2]], {"world_size": 2}, "saved with world_size=1 and this one has 2"),
        ([[3, 4], [5], [2]], {"vision_work": [1, 2, 3]}, "saved with lengths="),
    ],
)
def test_a_state_of_other_rows_is_refused(rows, arguments, says):
    state = json.loads(json.dumps(PackedSampler([[3, 4], [5], [2]]).state_dict()))
    with pytest.raises(InputError, match=says):
        PackedSampler(rows, **arguments).load_state_dict(state)


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 1), (3, 2)])
def test_accelerate_deals_out_the_same_rows(rows, world_size, batch_size):
    arguments = {"rows_per_rank": 4 * batch_size, "batch_size": batch_size}
    for rank, sampler in enumerate(samplers(rows, world_size, **arguments)):
        batches = BatchSampler(sampler.dealt_in_turn().tolist(), batch_size, drop_last=False)
        shard = BatchSamplerShard(batches, world_size, rank)
        assert list(itertools.chain(*shard)) == list(sampler)


def test_one_rank_has_a_short_last_batch():
    sampler = PackedSampler([[n] for n in range(1, 6)], rows_per_rank=2, batch_size=2)
    assert sampler.epoch == 0
    assert sampler.dealt_in_turn().tolist() == list(sampler)
    assert len(sampler) == 5


# ---- bad input


@table(
    ("arguments", "says"),
    [
        ({"world_size": 2, "rank": 2}, "rank is 2 of 2; give 0 to 1"),
        ({"rows_per_rank": 3, "batch_size": 2}, "rows_per_rank is 3; give a multiple of batch_size 2"),
        ({"attention_weight": 1.5}, "attention_weight is 1.5"),
        ({"seq_lengths": [[1], []]}, "seq_lengths are [[1], []]"),
        ({"vision_work": [float("nan")]}, "vision_work needs a number from 0"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError) as caught:
        PackedSampler(**{"seq_lengths": [[1]], **arguments})
    assert says in str(caught.value)


def test_rows_are_dealt_out_as_ever(rows):
    """A run of an older release goes on in the order that it began with."""
    sampler = PackedSampler(rows, 8, rows_per_rank=4, seed=3)
    assert hashlib.sha256(sampler.assignment().tobytes()).hexdigest()[:16] == "c893f5be74a9880f"
    assert sampler.state_dict()["settings"]["lengths"] == "1fd4b83ca5619149"


def test_work_on_images_is_evened_out(rows):
    """A tenth of the rows has most of the images, as where they are mixed with text."""
    generator = np.random.default_rng(1)
    work = np.where(generator.random(len(rows)) < 0.1, generator.lognormal(8, 1, len(rows)), 0)
    blind = PackedSampler(rows, 8, rows_per_rank=8)
    seeing = PackedSampler(rows, 8, rows_per_rank=8, vision_work=work)

    def waiting(assignment):
        of_window = seeing.cost[assignment][:, : assignment.shape[1] // 8 * 8].reshape(8, -1, 8).sum(axis=2)
        return 1 - of_window.mean(axis=0).sum() / of_window.max(axis=0).sum()

    assert waiting(seeing.assignment()) < waiting(blind.assignment()) / 2
    assert seeing.spread().waiting == pytest.approx(waiting(seeing.assignment()), rel=0.1)
    assert ", images " in str(seeing.spread())
    assert sorted(np.unique(seeing.assignment())) == list(range(len(rows)))
