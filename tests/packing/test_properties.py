"""Properties for any input: no document is lost, split or doubled, no bin overflows, packing can be undone.

500 examples in all by default, 25,000 with `-m nightly`.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_pack.packing import (
    PackedSampler,
    PackingStream,
    concatenate_and_pack,
    pack_sequences,
    plan_packs,
)
from unsloth_pack.packing.planner import STRATEGIES


@st.composite
def lengths_and_capacity(draw, largest=4096):
    capacity = draw(st.integers(1, largest) | st.integers(1, 12))
    length = st.integers(0, capacity)
    common = draw(st.lists(length, min_size=1, max_size=4))
    return draw(st.lists(length | st.sampled_from(common), max_size=200)), capacity


@st.composite
def sequences_and_arguments(draw, largest):
    lengths, capacity = draw(lengths_and_capacity(largest=largest))
    arguments = {
        "max_length": capacity,
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "sep_token_id": draw(st.none() | st.just(-1)),
    }
    return lengths, arguments, draw(st.sampled_from(["list", "numpy"]))


def every_document_is_in_one_bin(case):
    lengths, capacity = case
    for strategy in STRATEGIES:
        plan = plan_packs(lengths, capacity, strategy)
        placed = [i for documents in plan.bins for i in documents]
        assert sorted(placed) == [i for i, length in enumerate(lengths) if length]
        assert all(documents for documents in plan.bins)
        filled = [sum(lengths[i] for i in documents) for documents in plan.bins]
        assert all(tokens <= capacity for tokens in filled)
        assert plan.tokens == sum(lengths)
        assert plan.padding == sum(capacity - tokens for tokens in filled)


def packing_can_be_undone(case):
    lengths, arguments, kind = case
    lengths = [length for length in lengths if length]
    starts = itertools.accumulate([1, *lengths])
    sequences = [list(range(start, start + n)) for n, start in zip(lengths, starts, strict=False)]
    given_ones = sequences if kind == "list" else [np.array(s) for s in sequences]
    rows, boundaries = pack_sequences(given_ones, pad_token_id=0, return_boundaries=True, **arguments)
    rows = rows if isinstance(rows, list) else rows.tolist()
    assert [rows[row][start:end] for row, start, end in boundaries] == sequences
    gaps = len(sequences) - len(rows) if arguments["sep_token_id"] else 0
    in_rows = list(itertools.chain.from_iterable(rows))
    assert in_rows.count(-1) == gaps
    assert in_rows.count(0) == len(in_rows) - sum(lengths) - gaps
    assert all(len(row) == arguments["max_length"] for row in rows)
    if kind == "list":
        packed = concatenate_and_pack(
            sequences,
            sequences,
            sequences,
            max_length=arguments["max_length"],
            pad_token_id=0,
            label_pad_id=0,
        )
        assert packed == (pack_sequences(sequences, arguments["max_length"], 0),) * 3


def a_stream_keeps_every_document(case):
    (lengths, capacity), buffer_size, ratio, strategy = case
    numbers = [[i] * length for i, length in enumerate(lengths)]
    stream = PackingStream(capacity, buffer_size, ratio, strategy=strategy)
    seen = []
    for pack in stream.pack(numbers):
        assert 0 < len(pack["input_ids"]) == sum(pack["seq_lengths"]) <= capacity
        assert stream.waiting <= 2 * buffer_size
        ends = itertools.accumulate(pack["seq_lengths"])
        seen += [(pack["input_ids"][end - 1], n) for end, n in zip(ends, pack["seq_lengths"], strict=True)]
    assert sorted(seen) == [(i, length) for i, length in enumerate(lengths) if length]


def a_restored_sampler_goes_on(case):
    lengths, world_size, rows_per_rank, seed, taken = case
    whole = []
    for rank in range(world_size):
        sampler = PackedSampler(lengths, world_size, rank, rows_per_rank=rows_per_rank, seed=seed)
        whole.append(list(sampler))
        sampler.set_epoch(1)
        sampler.set_epoch(0)
        taken = min(taken, len(sampler) - 1)
        head = list(itertools.islice(sampler, taken))
        restored = PackedSampler(lengths, world_size, rank, rows_per_rank=rows_per_rank, seed=seed)
        restored.load_state_dict(sampler.state_dict())
        assert head + list(restored) == whole[-1]
    assert len({len(rows) for rows in whole}) == 1
    assert set(itertools.chain.from_iterable(whole)) == set(range(len(lengths)))


ROWS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=40)
PROPERTIES = {
    every_document_is_in_one_bin: lengths_and_capacity(),
    packing_can_be_undone: sequences_and_arguments(64),
    a_stream_keeps_every_document: st.tuples(
        lengths_and_capacity(),
        st.integers(1, 40),
        st.sampled_from([0.01, 0.5, 0.7, 1.0]),
        st.sampled_from(STRATEGIES),
    ),
    a_restored_sampler_goes_on: st.tuples(
        ROWS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.integers(0, 20)
    ),
}


def check(holds, cases, examples):
    settings(max_examples=examples, deadline=None)(given(cases)(holds))()


@pytest.mark.parametrize("holds", PROPERTIES)
def test_holds(holds):
    check(holds, PROPERTIES[holds], 500 // len(PROPERTIES))


@pytest.mark.nightly
@pytest.mark.parametrize("holds", PROPERTIES)
def test_holds_nightly(holds):
    check(holds, PROPERTIES[holds], 25_000 // len(PROPERTIES))
