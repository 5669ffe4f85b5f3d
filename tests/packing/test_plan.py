"""plan_packs: each strategy against its definition, the numbers of a plan, and errors for bad lengths."""

import pickle

import numpy as np
import pytest
import torch
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.packing import plan_packs
from unsloth_pack.packing.planner import STRATEGIES


def plain_plan(lengths, capacity, strategy):
    """The definition, document by document."""
    documents = [i for i, length in enumerate(lengths) if length]
    if strategy in ("ffd", "bfd"):
        documents.sort(key=lambda i: -lengths[i])
    bins, room = [], []
    for i in documents:
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if strategy == "next_fit":
            fitting = [b for b in fitting if b == len(bins) - 1]
        if strategy == "bfd":
            fitting.sort(key=room.__getitem__)
        if fitting:
            b = fitting[0]
        else:
            b = len(bins)
            bins.append([])
            room.append(capacity)
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def random_lengths(seed, documents, capacity):
    generator = np.random.default_rng(seed)
    few = generator.integers(1, capacity + 1, size=5)  # equal lengths are what moves together
    some = generator.integers(0, capacity + 1, size=documents)
    return np.where(generator.random(documents) < 0.5, some, generator.choice(few, documents))


@table("seed", range(20))
@table("strategy", STRATEGIES)
def test_bins_are_those_of_the_definition(strategy, seed):
    """With best fit, any of several equally tight bins may take a document: the fills are the same."""
    capacity = 3 + 5 * seed
    lengths = random_lengths(seed, documents=1 + 17 * seed, capacity=capacity)
    plan, defined = plan_packs(lengths, capacity, strategy), plain_plan(lengths, capacity, strategy)
    if strategy != "bfd":
        assert plan.bins == defined
    assert sorted(lengths[b].sum() for b in plan.bins) == sorted(lengths[b].sum() for b in defined)
    assert plan.n_bins == len(plan.bins)


def test_equal_lengths_keep_their_order():
    assert plan_packs([2, 3, 2, 3, 2, 3], 6).bins == [[1, 3], [5, 0], [2, 4]]


def test_numbers_of_a_plan():
    plan = plan_packs([3, 0, 5, 4, 3, 0], 8)
    assert (plan.n_bins, plan.n_documents, plan.n_empty, plan.tokens) == (2, 4, 2, 15)
    assert plan.padding == 1
    assert plan.efficiency == 15 / 16
    assert plan.histogram.tolist() == [2, 0, 0, 2, 1, 1]
    assert plan.bins == [[2, 0], [3, 4]]
    assert plan.bins != [[2, 0], [4, 3]]
    assert plan.bins != 2
    assert plan.bins[-1] == [3, 4]
    assert plan.bins[0:1] == [[2, 0]]
    assert repr(plan.bins) == "<2 bins: [2, 0], [3, 4]>"
    with pytest.raises(IndexError):
        plan.bins[2]
    assert repr(plan_packs([1] * 4, 1).bins) == "<4 bins: [0], [1], [2], ...>"


@table("strategy", STRATEGIES)
@table("lengths", [[], [0], [0, 0, 0]])
def test_no_documents(lengths, strategy):
    plan = plan_packs(lengths, 8, strategy)
    assert (plan.n_bins, plan.tokens, plan.padding, plan.efficiency) == (0, 0, 0, 1.0)
    assert plan.n_empty == len(lengths)
    assert plan.bins == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_length_one_and_length_of_the_capacity(strategy):
    assert plan_packs([1], 1, strategy).bins == [[0]]
    assert plan_packs([4, 4], 4, strategy).bins == [[0], [1]]
    assert sorted(map(len, plan_packs([1] * 7 + [4], 4, strategy).bins)) == [1, 3, 4]


@table("strategy", STRATEGIES)
@table("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint64])
def test_every_integer_type(strategy, dtype):
    lengths = np.array([200, 100, 0, 150, 90, 55] * 5, dtype)
    assert plan_packs(lengths, 255, strategy).bins == plan_packs(lengths.tolist(), 255, strategy).bins


def test_a_plan_can_be_pickled_before_its_bins_are_known():
    plan = plan_packs(torch.tensor([3, 5, 4]), 10**15)
    assert pickle.loads(pickle.dumps(plan)).bins == plan.bins == [[1, 2, 0]]


def test_a_million_documents_fill_their_bins():
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(370) - 0.32, 0.8, 10**6), 1, 4096).astype(np.int32)
    plan = plan_packs(lengths, 4096)
    assert plan.efficiency >= 0.9998
    assert np.array_equal(np.sort(plan.order), np.arange(10**6))
    filled = np.add.reduceat(lengths[plan.order], plan.offsets[:-1])
    assert filled.max() <= 4096
    assert len(filled) == plan.n_bins


@table(
    ("lengths", "says"),
    [
        ([1, -2], "document 1 has -2 tokens"),
        ([4, 9, 12], "document 1 has 9 tokens and capacity is 8 (2 of 3 are over it)"),
        ([1.5], "float64"),
        ([True], "bool"),
        ([[1, 2]], "shape (1, 2)"),
        ([[1], [2, 3]], "do not make an array"),
        (["a"], "one integer a document"),
        (3, "shape ()"),
        ([2**70], "type object"),
    ],
)
@table("strategy", STRATEGIES)
def test_bad_lengths(lengths, says, strategy):
    with pytest.raises(InputError) as caught:
        plan_packs(lengths, 8, strategy)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@table(
    ("arguments", "says"),
    [
        ((0,), "capacity is 0; give a whole number of at least 1"),
        ((1.5,), "capacity is 1.5; give a whole number"),
        ((True,), "capacity is True; give a whole number"),
        ((8, "best"), "no packing strategy 'best'; choose one of next_fit, first_fit, ffd, bfd"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError, match=says):
        plan_packs([1], *arguments)
