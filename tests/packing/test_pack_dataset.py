"""pack_dataset: every token of every document once, in rows that TRL trains on as they are."""

import datasets
import numpy as np
import pytest
from tables import table

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


def test_several_processes_make_the_same_rows():
    dataset = datasets.Dataset.from_list(documents(4000))
    one, two = (pack_dataset(dataset, 64, num_proc=n) for n in (None, 2))
    assert one.to_list() == two.to_list()


def test_documents_without_tokens_are_left_out():
    rows = [{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}]
    packed = pack_dataset(datasets.Dataset.from_list(rows), 8)
    assert packed.to_list() == [{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}]


@table(
    ("rows", "message"),
    [
        ([{"input_ids": [1] * 9}], r"document 0 has 9 tokens and capacity is 8 .*truncate, split or drop"),
        ([{"text": "a"}], "the data set has the columns text; tokenise it"),
        ([{"input_ids": [1], "text": "a"}], "column 'text' holds string, not one number a token"),
        ([{"input_ids": [1, 2], "labels": [1]}], "column 'labels' does not hold one number per token"),
        ([{"input_ids": [1], "seq_lengths": [1]}], "it is packed already"),
        ([{"input_ids": [1][:0]}, {"input_ids": [1][:0]}], "documents? has tokens|holds null"),
        (
            [{"input_ids": [1]}, {"input_ids": [1, None]}],
            "^row 1, column 'input_ids': a token is None; give one number a token, or remove the row$",
        ),
        (
            [{"input_ids": [1.0]}, {"input_ids": []}, {"input_ids": [2.0, 1.5]}],
            "^row 2, column 'input_ids': a token is 1.5; the column holds double; give whole numbers",
        ),
        (
            [{"input_ids": []}, {"input_ids": [2.0]}],
            "row 1, column 'input_ids': a token is 2.0; .* holds double",
        ),
        ([{"input_ids": [1], "labels": [float("nan")]}], "row 0, column 'labels': a token is nan;"),
        (
            [{"input_ids": [1], "weight": [0.5]}, {"input_ids": [1], "weight": [None]}],
            "row 1, column 'weight'",
        ),
        (
            [{"input_ids": [1], "tokens": ["a"]}],
            "column 'tokens' holds list<.*string>, not one number a token",
        ),
        ([{"input_ids": [None]}], "row 0, column 'input_ids': a token is None"),
    ],
    ids=[
        *("overlong", "untokenised", "text", "short labels", "packed", "empty"),
        *("null", "fraction", "float", "nan label", "null weight", "words", "nothing but null"),
    ],
)
def test_what_cannot_be_packed(rows, message):
    with pytest.raises(InputError, match=message):
        pack_dataset(datasets.Dataset.from_list(rows), 8)


def test_the_row_of_a_null_is_that_of_the_view():
    """Past the first batch, in a set that was reordered and cut."""
    rows = datasets.Dataset.from_dict({"input_ids": [[1, None]] + [[1]] * 12_000})
    view = rows.select([*range(1, 12_001), 0])
    with pytest.raises(InputError, match=r"^row 12000, column 'input_ids': a token is None"):
        pack_dataset(view, 8)
    assert len(pack_dataset(view.select(range(8)), 8)) == 1


def test_other_columns_may_hold_fractions():
    rows = [{"input_ids": [1, 2], "weight": [0.5, 1.0]}, {"input_ids": [3], "weight": [0.25]}]
    packed = pack_dataset(datasets.Dataset.from_list(rows), 8)
    assert packed.to_list() == [{"input_ids": [1, 2, 3], "weight": [0.5, 1.0, 0.25], "seq_lengths": [2, 1]}]
