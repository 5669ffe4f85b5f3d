"""`unsloth_pack.packing` beside torch's loaders and datasets' sets: nothing is lost or changed."""

import itertools

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from unsloth_pack.packing import PackedSampler, PackingStream, length_report, pack_dataset, plan_accumulation

ROWS = [[3, 4], [5], [2, 2, 2], [7], [1, 6]] * 6
DOCUMENTS = [list(range(n % 13)) for n in range(0, 600, 7)]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


# PackedSampler


def test_a_look_at_the_first_batch_loses_no_rows():
    loader = DataLoader(range(len(ROWS)), batch_size=2, sampler=PackedSampler(ROWS))
    first = next(iter(loader))
    batches = list(loader)
    assert torch.equal(batches[0], first)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(ROWS)))


def test_two_iterators_at_once_each_give_all_rows():
    sampler = PackedSampler(ROWS)
    assert all(a == b for a, b in zip(sampler, sampler, strict=True))


def test_a_resumed_epoch_keeps_its_place_until_it_is_done():
    sampler = PackedSampler(ROWS, 2, 1)
    whole = list(sampler)
    head = list(itertools.islice(sampler, 4))
    resumed = PackedSampler(ROWS, 2, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert next(iter(resumed)) == whole[4]
    assert head + list(resumed) == whole
    assert list(resumed) == whole


def test_a_state_of_rows_with_other_lengths_is_refused():
    state = PackedSampler([[3, 4], [5], [2]]).state_dict()
    with pytest.raises(ValueError, match="saved with lengths="):
        PackedSampler([[3, 4], [2], [5]]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with attention_weight=0\.5"):
        PackedSampler([[3, 4], [5], [2]], attention_weight=0.2).load_state_dict(state)
    with pytest.raises(ValueError, match="not one of this release's PackedSampler"):
        PackedSampler(ROWS).load_state_dict({})


# PackingStream


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_a_caller_may_fill_its_array_anew(make):
    def examples():
        array = make(4)
        ids = array.astype(np.int64) if make is np.zeros else array.long()
        for number in range(5):
            ids[:] = number
            yield {"input_ids": ids[:3], "labels": ids[1:]}

    packs = list(PackingStream(6, seed=None).pack(examples()))
    for name in ("input_ids", "labels"):
        assert sorted(int(n) for pack in packs for n in pack[name]) == sorted(list(range(5)) * 3)


# pack_dataset


def make(kind, size=None):
    one = datasets.LargeList if kind == "large" else datasets.List
    value = datasets.Value("int64" if kind == "large" else kind)
    feature = one(value) if size is None else one(value, length=size)
    documents = DOCUMENTS if size is None else [d[:size] for d in DOCUMENTS if len(d) >= size]
    features = datasets.Features({"input_ids": feature, "labels": feature})
    return datasets.Dataset.from_dict({"input_ids": documents, "labels": documents}, features=features)


def documents_in(rows):
    for row in rows:
        ends = np.cumsum(row["seq_lengths"])
        assert ends[-1] == len(row["input_ids"]) == len(row["labels"]) <= 24
        for end, length in zip(ends, row["seq_lengths"], strict=True):
            ids = row["input_ids"][end - length : end]
            assert ids == row["labels"][end - length : end]
            yield ids


def in_parts(rows):
    return datasets.concatenate_datasets([rows.select(range(9)), rows.shuffle(1).select(range(20)), rows])


KINDS = ["int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64", "large"]
VIEWS = {
    "filtered": lambda rows: rows.filter(lambda row: len(row["input_ids"]) % 2),
    "in parts": in_parts,
    "sorted": lambda rows: rows.add_column("at", range(len(rows), 0, -1)).sort("at").remove_columns("at"),
    "split": lambda rows: rows.train_test_split(0.3, seed=0)["test"],
    "repeated": lambda rows: rows.repeat(2),
    "for torch": lambda rows: rows.select(range(5, 40)).with_format("torch"),
    "for numpy": lambda rows: rows.shard(3, 1).with_format("numpy", columns=["input_ids"]),
}
SETS = {kind: (lambda kind=kind: make(kind)) for kind in KINDS}
SETS |= {name: (lambda view=view: view(make("int32"))) for name, view in VIEWS.items()}
SETS["of one length"] = lambda: in_parts(make("int32", size=8))


@pytest.mark.parametrize("rows", SETS.values(), ids=SETS)
def test_every_token_comes_once(rows):
    rows = rows()
    expected = [row["input_ids"] for row in rows.with_format(None) if row["input_ids"]]
    assert sorted(documents_in(pack_dataset(rows, 24))) == sorted(expected)


def test_a_transform_is_not_passed_over():
    rows = make("int64").with_transform(lambda batch: {"input_ids": [[1] for _ in batch["input_ids"]]})
    with pytest.raises(
        ValueError, match=r"has a transform, which packing would pass over; apply it with \.map"
    ):
        pack_dataset(rows, 24)


# What is counted


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"capacities": 2048}, "capacities are 2048; give a list of them, such as"),
        ({"world_size": 0}, "world_size is 0"),
        ({"per_device_batch": 0}, "per_device_batch is 0"),
        ({"target_effective": 1.5}, "target_effective is 1.5"),
    ],
)
def test_a_report_checks_its_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        length_report([3, 4], **arguments)


def test_accumulation_is_at_least_one_micro_batch():
    assert plan_accumulation(1, 1e308, 10, 10) == 1
    with pytest.raises(ValueError, match="samples_per_pack is '2'"):
        plan_accumulation(32, "2")
