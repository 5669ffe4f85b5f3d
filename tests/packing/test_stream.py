"""PackingStream: which packs go out and when, the carry, the end, saved states, rollouts, bad examples."""

import io
import itertools
import json

import numpy as np
import pytest
import torch
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.packing import PackingStream


def example(length, first=0):
    ids = list(range(first, first + length))
    return {"input_ids": ids, "labels": [-x for x in ids]}


def examples(seed, number, longest):
    """Examples in which no two tokens are alike."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, number).tolist()
    return [example(n, first) for n, first in zip(lengths, itertools.accumulate([0, *lengths]), strict=False)]


def lengths_out(stream, lengths):
    return [pack["seq_lengths"] for pack in stream.pack([0] * n for n in lengths)]


def documents_of(packs):
    for pack in packs:
        ends = list(itertools.accumulate(pack["seq_lengths"]))
        for length, end in zip(pack["seq_lengths"], ends, strict=True):
            yield tuple(pack["input_ids"][end - length : end])


# ---- packs


@pytest.mark.parametrize("strategy", ["next_fit", "bfd"])
def test_nothing_is_lost_split_or_overfull(strategy):
    source = examples(0, 500, longest=40)
    stream = PackingStream(64, buffer_size=32, strategy=strategy)
    packs = list(stream.pack(source))
    assert sorted(documents_of(packs)) == sorted(tuple(e["input_ids"]) for e in source)
    assert all(len(pack["input_ids"]) == sum(pack["seq_lengths"]) <= 64 for pack in packs)
    assert all(pack["labels"] == [-x for x in pack["input_ids"]] for pack in packs)
    tokens = sum(len(e["input_ids"]) for e in source)
    counts = stream.counts
    assert (counts.examples, counts.documents, counts.tokens, counts.packs) == (500, 500, tokens, len(packs))
    assert stream.consumed == 0  # at the begin again


# ---- when packs go out


def test_the_ratio_itself_is_full_enough():
    stream = PackingStream(100, buffer_size=2, min_fill_ratio=0.29, seed=None)
    stream.push([0] * 29)
    stream.push([0] * 100)
    assert stream.pop()["seq_lengths"] == [29]


# ---- the end


def test_drop_last_drops_and_counts_what_is_not_full_enough():
    stream = PackingStream(10, buffer_size=8, drop_last=True)
    assert lengths_out(stream, [10, 8, 1, 3, 3]) in ([[10], [8, 1]], [[8, 1], [10]])
    assert (stream.counts.leftover_documents, stream.counts.leftover_tokens) == (2, 6)
    assert (stream.counts.documents, stream.counts.tokens) == (3, 19)
    assert stream.waiting == 0


# ---- empty and over-long


@pytest.mark.parametrize(
    ("overlong", "out", "lost"),
    [("truncate", [[4], [2]], 2), ("drop", [[2]], 6), ("split", [[4], [2, 2]], 0)],
)
def test_empty_and_overlong_are_counted(overlong, out, lost):
    stream = PackingStream(4, seed=None, overlong=overlong)
    assert lengths_out(stream, [0, 6, 2]) == out
    counts = stream.counts
    cut = counts.truncated + counts.dropped + counts.split
    assert (counts.examples, counts.empty, cut, counts.tokens_lost) == (3, 1, 1, lost)


# ---- order and state


def test_the_same_seed_gives_the_same_packs():
    source = examples(1, 300, longest=30)
    streams = {seed: PackingStream(64, 64, seed=seed) for seed in (0, 1, None)}
    runs = {seed: list(stream.pack(source)) for seed, stream in streams.items()}
    assert runs[0] == list(PackingStream(64, 64, seed=0).pack(source))
    runs[2] = list(streams[0].pack(source))  # a second pass is in another order
    assert runs[0] not in (runs[1], runs[2])
    assert sorted(runs[0], key=str) == sorted(runs[1], key=str) == sorted(runs[2], key=str)
    assert sorted(runs[0], key=str) == sorted(runs[None], key=str)


@pytest.mark.parametrize(("atomic", "through"), [(False, "json"), (True, "torch")])
def test_a_restored_stream_continues_exactly(atomic, through):
    source = examples(2, 120, longest=30)
    arguments = dict(capacity=64, buffer_size=16, seed=5, atomic=atomic)
    stream = PackingStream(**arguments)
    whole = list(stream.pack(source))
    whole_counts = stream.counts
    for taken in (0, 1, 7, len(whole) - 1, len(whole)):
        stream = PackingStream(**arguments)
        before = list(itertools.islice(stream.pack(source), taken))
        state = stream.state_dict()
        if through == "torch":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        else:
            state = json.loads(json.dumps(state))
        restored = PackingStream(**arguments)
        restored.load_state_dict(state)
        assert before + list(restored.pack(source[state["consumed"] :])) == whole
        assert restored.counts == whole_counts


def test_ready_packs_take_no_example():
    stream = PackingStream(8, buffer_size=4)
    for _ in range(4):
        stream.push([0] * 8)
    restored = PackingStream(8, buffer_size=4)
    restored.load_state_dict(stream.state_dict())
    examples = iter([[0] * 8])
    assert [len(pack["input_ids"]) for pack in itertools.islice(restored.pack(examples), 3)] == [8, 8, 8]
    assert restored.consumed == 4
    assert len(list(examples)) == 1


def test_a_state_is_a_snapshot():
    stream = PackingStream(64, 4)
    stream.push([1, 2])
    state = stream.state_dict()
    saved = json.dumps(state)
    stream.push([3])
    stream.finish()
    restored = PackingStream(64, 4)
    restored.load_state_dict(state)
    restored.push([3])
    assert json.dumps(state) == saved


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_document_that_waits_is_no_view(make):
    """A loader may write the next document into the same memory."""
    memory, stream = make([1, 2, 3]), PackingStream(8, buffer_size=2, strategy="next_fit")
    stream.push(memory)
    memory[:] = 0
    stream.finish()
    assert stream.pop()["input_ids"].tolist() == [1, 2, 3]


@table(
    ("saved", "loaded", "says"),
    [
        ({}, {"capacity": 32}, "saved with capacity=64 and this one has 32; make it with the same"),
        ({"by_document": ["a", "b"]}, {"by_document": ["b", "a"]}, "saved with by_document="),
    ],
)
def test_a_state_of_another_stream_is_refused(saved, loaded, says):
    state = PackingStream(**{"capacity": 64, **saved}).state_dict()
    with pytest.raises(InputError, match=says):
        PackingStream(**{"capacity": 64, **loaded}).load_state_dict(state)
    with pytest.raises(InputError, match="saved with version=99 and this one has 1"):
        PackingStream(64).load_state_dict(state | {"version": 99})


# ---- rollouts


def test_atomic_segments_leave_in_the_order_they_came():
    source = examples(3, 200, longest=60)
    stream = PackingStream(64, buffer_size=16, atomic=True)
    packs = list(stream.pack(source))
    out = list(documents_of(packs))
    assert out == [tuple(e["input_ids"]) for e in source][: len(out)]
    assert len(out) + stream.counts.leftover_documents == 200
    full = [sum(pack["seq_lengths"]) for pack in packs]
    first = [pack["seq_lengths"][0] for pack in packs]
    assert all(tokens + following > 64 for tokens, following in zip(full, first[1:], strict=False))
    stream = PackingStream(8, buffer_size=1, atomic=True)
    stream.push([0] * 5)
    with pytest.raises(InputError, match="1 segments wait and buffer_size is 1; take packs out first"):
        stream.push([0] * 5)


# ---- bad input


@table(
    ("arguments", "says"),
    [
        ({"min_fill_ratio": 0}, "min_fill_ratio is 0; give a share above 0 and up to 1"),
        ({"strategy": "best"}, "no packing strategy 'best'"),
        ({"buffer_tokens": 0}, "buffer_tokens is 0"),
        ({"by_document": ["images"], "overlong": "split"}, "overlong is 'split' with by_document"),
        ({"atomic": True, "drop_last": False}, "atomic mode takes the oldest segment first"),
        ({"atomic": True, "overlong": "split"}, "atomic mode takes the oldest segment first"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError) as caught:
        PackingStream(**{"capacity": 8, **arguments})
    assert says in str(caught.value)


@table(
    ("bad", "says"),
    [
        ({"text": "a"}, "example 1 has the columns text; give tokenised examples that are not packed yet"),
        ({"input_ids": [1], "seq_lengths": [1]}, "that are not packed yet"),
        ({"input_ids": [1]}, "give all the same columns and kinds"),
        ({"input_ids": np.array([1]), "labels": [1]}, "give all the same columns and kinds"),
        ({"input_ids": [1, 2], "labels": [1]}, "column 'labels' has 1 values for 2 tokens; give one a token"),
        ({"input_ids": torch.ones(1, 2), "labels": [1]}, "column 'input_ids', is tensor([[1., 1.]]); give a"),
        (
            {"input_ids": [1, None], "labels": [1, 2]},
            "example 1, column 'input_ids', is [1, None]; give a flat",
        ),
    ],
)
def test_bad_examples(bad, says):
    stream = PackingStream(8)
    stream.push(example(2))
    before = stream.state_dict()
    with pytest.raises(InputError) as caught:
        stream.push(bad)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert stream.state_dict() == before


def test_the_tokens_that_wait_are_bounded():
    lengths = np.random.default_rng(0).integers(1, 101, 500).tolist()
    stream = PackingStream(100, 1000, buffer_tokens=400)
    for _ in stream.pack([0] * n for n in lengths):
        assert sum(len(document["input_ids"]) for document in stream.state_dict()["buffer"]) < 400


def test_what_belongs_to_a_document_goes_where_it_goes():
    stream = PackingStream(10, 4, by_document=["images"])
    given = [{"input_ids": [n] * (3 + n % 4), "images": [{"of": n}] * (n % 3)} for n in range(30)]
    packs = list(stream.pack(given))
    assert any(len(pack["seq_lengths"]) > 1 for pack in packs)
    found = {}
    for pack in packs:
        assert len(pack["images"]) == len(pack["seq_lengths"])
        starts = np.cumsum([0, *pack["seq_lengths"][:-1]])
        found |= {
            pack["input_ids"][start]: images for start, images in zip(starts, pack["images"], strict=True)
        }
    assert found == {n: example["images"] for n, example in enumerate(given)}
    stream.push(given[0])
    again = PackingStream(10, 4, by_document=["images"])
    again.load_state_dict(stream.state_dict())
    stream.finish()
    again.finish()
    assert stream.pop() == again.pop() == {"input_ids": [0, 0, 0], "images": [[]], "seq_lengths": [3]}
