"""pack_dataset: every token of every document once, in rows that TRL trains on as they are."""

import datasets
import numpy as np
import pytest
from packs_on_disk import documents
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.packing import pack_dataset, plan_packs


def unpacked(packed):
    """The documents of all rows, in any order."""
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        ends = np.cumsum(row["seq_lengths"])
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield {name: row[name][start:end] for name in ("input_ids", "labels")}


def as_set(rows):
    return sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in rows)


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


def test_several_processes_make_the_same_rows():
    dataset = datasets.Dataset.from_list(documents(4000))
    one, two = (pack_dataset(dataset, 64, num_proc=n) for n in (None, 2))
    assert one.to_list() == two.to_list()


def test_documents_without_tokens_are_left_out():
    """Columns beside ids and labels may hold fractions."""
    ids, weights = [[1, 2], [], [3]], [[0.5, 1.0], [], [0.25]]
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": ids, "weight": weights}), 8)
    assert packed.to_list() == [{"input_ids": [1, 2, 3], "weight": [0.5, 1.0, 0.25], "seq_lengths": [2, 1]}]


def test_labels_of_documents_stand_beside_their_documents():
    """A list of one label for each document becomes a list of labels for each row."""
    rows = [*documents(500), {"input_ids": [], "labels": [7]}]
    rows = [{"input_ids": row["input_ids"], "labels": [sum(row["input_ids"]) % 7]} for row in rows]
    packed = pack_dataset(datasets.Dataset.from_list(rows), 64)
    seen = 0
    for row in packed:
        ends = np.cumsum(row["seq_lengths"])
        sums = [sum(row["input_ids"][a:b]) % 7 for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        assert row["labels"] == sums
        seen += len(sums)
    assert seen == 500


@table(
    ("rows", "message"),
    [
        ([{"input_ids": [1] * 9}], r"document 0 has 9 tokens and capacity is 8 .*truncate, split or drop"),
        ([{"text": "a"}], "the data set has the columns text; tokenise it"),
        ([{"input_ids": [1], "text": "a"}], "column 'text' holds string, not one number a token"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], "column .labels. does not hold one number per token"),
        ([{"input_ids": [1], "seq_lengths": [1]}], "it is packed already"),
        ([{"input_ids": [1][:0]}, {"input_ids": [1][:0]}], "none of 2 documents has tokens"),
        ([{"input_ids": [1]}, {"input_ids": [1, None]}], "^row 1, column 'input_ids': a token is None"),
        ([{"input_ids": [1.0]}], "column 'input_ids' holds double; give whole numbers"),
    ],
)
def test_what_cannot_be_packed(rows, message):
    with pytest.raises(InputError, match=message):
        pack_dataset(datasets.Dataset.from_list(rows), 8)
