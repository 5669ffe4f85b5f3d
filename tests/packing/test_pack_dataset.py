"""pack_dataset: every token of every document once, in rows that TRL trains on as they are."""

import os

import datasets
import numpy as np
import pytest

from unsloth_pack.errors import InputError
from unsloth_pack.packing import pack_dataset, plan_packs


def documents(n, longest=40, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, n)
    ids = [rng.integers(0, 1000, length).tolist() for length in lengths]
    return [{"input_ids": x, "labels": [-100, *x[1:]]} for x in ids]


def unpacked(packed):
    """The documents of all rows, in any order."""
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        ends = np.cumsum(row["seq_lengths"])
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield {name: row[name][start:end] for name in ("input_ids", "labels")}


def as_set(rows):
    return sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in rows)


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize("strategy", ["bfd", "ffd", "first_fit", "next_fit"])
def test_every_document_once(strategy):
    rows = documents(3000)
    packed = pack_dataset(datasets.Dataset.from_list(rows), 64, strategy)
    assert as_set(unpacked(packed)) == as_set(rows)
    assert max(map(len, packed["input_ids"])) <= 64
    plan = plan_packs([len(row["input_ids"]) for row in rows], 64, strategy)
    assert len(packed) == plan.n_bins  # over the whole set, not in parts
    if strategy == "next_fit":
        assert list(unpacked(packed)) == rows


def test_selected_shuffled_and_formatted_sets():
    rows = documents(500)
    dataset = datasets.Dataset.from_list(rows).shuffle(seed=1).select(range(100, 400)).with_format("numpy")
    expected = dataset.with_format(None).to_list()
    assert as_set(unpacked(pack_dataset(dataset, 128))) == as_set(expected)


def test_several_processes_make_the_same_rows(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ)  # datasets leaves a copy there, which rich does not see
    dataset = datasets.Dataset.from_list(documents(4000))
    one, two = (pack_dataset(dataset, 64, num_proc=n) for n in (None, 2))
    assert one.to_list() == two.to_list()


def test_a_stream():
    rows = documents(1000)
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    packed = pack_dataset(stream, 64, buffer_size=100)
    assert isinstance(packed, datasets.IterableDataset)
    assert as_set(unpacked(packed)) == as_set(rows)
    assert list(packed) == list(packed)


def test_documents_without_tokens_are_left_out():
    rows = [{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}]
    packed = pack_dataset(datasets.Dataset.from_list(rows), 8)
    assert packed.to_list() == [{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1] * 9}], r"document 0 has 9 tokens and capacity is 8 .*truncate, split or drop"),
        ([{"text": "a"}], "the data set has the columns text; tokenise it"),
        ([{"input_ids": [1], "text": "a"}], "column 'text' holds string, not one number a token"),
        ([{"input_ids": [1, 2], "labels": [1]}], "column 'labels' has not one number a token"),
        ([{"input_ids": [1], "seq_lengths": [1]}], "it is packed already"),
        ([{"input_ids": [1][:0]}, {"input_ids": [1][:0]}], "documents? has tokens|holds null"),
    ],
    ids=["overlong", "untokenised", "text", "short labels", "packed", "empty"],
)
def test_what_cannot_be_packed(rows, message):
    with pytest.raises(InputError, match=message):
        pack_dataset(datasets.Dataset.from_list(rows), 8)
