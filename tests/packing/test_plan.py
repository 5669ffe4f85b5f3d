"""plan_packs: each strategy against its definition, the numbers of a plan, and errors for bad lengths."""

import numpy as np
import pytest
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


@table("seed", range(8))
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


def test_numbers_of_a_plan():
    plan = plan_packs([3, 0, 5, 4, 3, 0], 8)
    assert (plan.n_bins, plan.n_documents, plan.n_empty, plan.tokens) == (2, 4, 2, 15)
    assert plan.padding == 1
    assert plan.efficiency == 15 / 16
    assert plan.histogram.tolist() == [2, 0, 0, 2, 1, 1]
    assert plan.bins == [[2, 0], [3, 4]]
    small = np.array([200, 100, 0, 150, 90, 55], np.uint8)  # sums beyond its type
    assert plan_packs(small, 255).bins == plan_packs(small.tolist(), 255).bins


@table("strategy", STRATEGIES)
@table("lengths", [[], [0, 0]])
def test_no_documents(lengths, strategy):
    plan = plan_packs(lengths, 8, strategy)
    assert (plan.n_bins, plan.tokens, plan.padding, plan.efficiency) == (0, 0, 0, 1.0)
    assert plan.n_empty == len(lengths)
    assert plan.bins == []


@table(
    ("lengths", "says"),
    [
        ([1, -2], "document 1 has -2 tokens"),
        ([4, 9, 12], "document 1 has 9 tokens and capacity is 8 (2 of 3 are over it)"),
        ([1.5], "float64"),
        ([[1, 2]], "shape (1, 2)"),
    ],
)
def test_bad_lengths(lengths, says):
    with pytest.raises(InputError) as caught:
        plan_packs(lengths, 8)
    assert says in str(caught.value)
