"""`unsloth_pack.packing` beside torch's loaders and datasets' sets: nothing is lost or changed."""

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from unsloth_pack.packing import PackedSampler, pack_dataset

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


KINDS = ["uint8", "int64", "large"]
VIEWS = {
    "filtered": lambda rows: rows.filter(lambda row: len(row["input_ids"]) % 2),
    "in parts": in_parts,
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
