"""pack_sequences and concatenate_and_pack: exact rows, the kinds of the results, errors for bad input."""

import warnings

import numpy as np
import pytest
import torch
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.packing import CutCounts, PackingWarning, concatenate_and_pack, pack_sequences

SEQUENCES = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
ROWS = [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]]
IDS = [[1, 2, 3], [4, 5, 6, 7]]
LABELS = [[-100, 2, 3], [-100, -100, 6, 7]]
MASKS = [[1, 1, 1], [1, 1, 1, 1]]

KINDS = {
    "list": lambda x: x,
    "numpy": lambda x: np.array(x, np.int32),
    "torch": lambda x: torch.tensor(x, dtype=torch.int32),
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackingWarning)
        yield


def as_lists(rows):
    return rows if isinstance(rows, list) else rows.tolist()


def error_of(*args, pack=pack_sequences, **kwargs):
    with pytest.raises(InputError) as caught:
        pack(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- rows


@pytest.mark.parametrize(
    ("options", "rows", "boundaries"),
    [
        ({}, ROWS, [(0, 0, 3), (0, 3, 5), (1, 0, 4), (1, 4, 7)]),
        (
            {"max_length": 7, "strategy": "bfd"},
            [[6, 7, 8, 9, 1, 2, 3], [10, 11, 12, 4, 5, 0, 0]],
            [(0, 4, 7), (1, 3, 5), (0, 0, 4), (1, 0, 3)],
        ),
        (
            {"sep_token_id": 99},
            [[1, 2, 3, 99, 4, 5, 0, 0], [6, 7, 8, 9, 99, 10, 11, 12]],
            [(0, 0, 3), (0, 4, 6), (1, 0, 4), (1, 5, 8)],
        ),
    ],
)
def test_rows_and_boundaries(options, rows, boundaries):
    """Boundaries are in input order for any strategy."""
    options = {"max_length": 8, "pad_token_id": 0, **options}
    assert pack_sequences(SEQUENCES, **options) == rows
    assert pack_sequences(SEQUENCES, **options, return_boundaries=True) == (rows, boundaries)


@table("kind", KINDS)
def test_a_separator_never_ends_a_row_nor_overfills_it(kind):
    sequences = [KINDS[kind](x) for x in ([1, 2, 3, 4], [5, 6, 7], [8], [9, 10])]
    packed = as_lists(pack_sequences(sequences, 4, 0, sep_token_id=99))
    assert packed == [[1, 2, 3, 4], [5, 6, 7, 0], [8, 99, 9, 10]]


def test_two_dimensional_input_and_no_sequences():
    assert pack_sequences(np.array([[1, 2], [3, 4]]), 5, 0).tolist() == [[1, 2, 3, 4, 0]]
    assert pack_sequences([], 5, 0, return_boundaries=True) == ([], [])


# ---- empty and over-long


@table("kind", KINDS)
@table(
    ("overlong", "rows", "boundaries", "counts"),
    [
        (
            "truncate",
            [[1, 2, 3, 0], [4, 5, 6, 7], [9, 0, 0, 0]],
            [(0, 0, 3), (1, 0, 4), (2, 0, 1)],
            CutCounts(empty=1, truncated=1, tokens_lost=1),
        ),
        (
            "drop",
            [[1, 2, 3, 9]],
            [(0, 0, 3), (0, 3, 4)],
            CutCounts(empty=1, dropped=1, tokens_lost=5),
        ),
        (
            "split",
            [[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 0, 0]],
            [(0, 0, 3), (1, 0, 4), (2, 0, 1), (2, 1, 2)],
            CutCounts(empty=1, split=1),
        ),
    ],
)
def test_empty_and_overlong(kind, overlong, rows, boundaries, counts):
    sequences = [KINDS[kind](x) for x in ([1, 2, 3], [], [4, 5, 6, 7, 8], [9])]
    packed = pack_sequences(sequences, 4, 0, overlong=overlong, return_boundaries=True, return_counts=True)
    assert (as_lists(packed[0]), *packed[1:]) == (rows, boundaries, counts)
    with pytest.warns(PackingWarning, match="pack_sequences: 1 empty dropped; over-long: ") as caught:
        pack_sequences(sequences, 4, 0, overlong=overlong)
    assert caught[0].filename == __file__


def test_overlong_is_an_error_unless_asked():
    assert error_of([[1], [1] * 9], 8, 0).startswith("sequences[1] has 9 tokens and a row holds 8; raise")
    assert "overlong is 'cut'; choose one of error, tr" in error_of([[1]], 8, 0, overlong="cut")


# ---- bad input


@table(
    ("sequences", "says"),
    [
        ([1, 2, 3], "sequences[0] is 1; give a flat list, array or tensor of numbers, one a token"),
        ({"input_ids": [[1]]}, "sequences is a dict; give a list of token sequences"),
        (torch.tensor(3), "sequences is a Tensor; give a list of token sequences"),
        ([[1], [2, None]], "sequences[1] is [2, None]; give a flat list"),
        ([[1], np.array([2])], "sequences[1] is numpy int64 and sequences[0] is list"),
        ([np.array([[1]])], "sequences[0] is array([[1]]); give a flat list"),
        ([np.array(["a"])], "sequences[0] is array(['a']"),
    ],
)
def test_what_is_no_list_of_sequences(sequences, says):
    assert says in error_of(sequences, 8, 0)


@table("pad", [-100, 0.5])
@table("sequence", [np.array([1], np.uint8), torch.tensor([1], dtype=torch.uint8)])
def test_padding_that_the_type_cannot_hold(sequence, pad):
    assert f"pad_token_id {pad} does not fit into" in error_of([sequence], 8, pad)
    assert "pad_token_id is None; give a number" in error_of([sequence], 8, None)


# ---- three columns


def test_three_columns():
    packed = concatenate_and_pack(IDS, LABELS, MASKS, max_length=8, pad_token_id=0, label_pad_id=-100)
    assert packed == (
        [[1, 2, 3, 4, 5, 6, 7, 0]],
        [[-100, 2, 3, -100, -100, 6, 7, -100]],
        [[1, 1, 1, 1, 1, 1, 1, 0]],
    )


def test_three_columns_cut_alike():
    columns = ([[], *column] for column in (IDS, LABELS, MASKS))
    options = {"max_length": 3, "pad_token_id": 0, "overlong": "split", "return_counts": True}
    packed = concatenate_and_pack(*columns, **options)
    assert packed == (
        [[1, 2, 3], [4, 5, 6], [7, 0, 0]],
        [[-100, 2, 3], [-100, -100, 6], [7, -100, -100]],
        [[1, 1, 1], [1, 1, 1], [1, 0, 0]],
        CutCounts(empty=1, split=1),
    )


@table(
    ("changed", "says"),
    [
        ({"labels": LABELS[:1]}, "document 1 has 4 tokens in input_ids and None in labels; give one a token"),
        ({"labels": [[1, 2, 3], [4]]}, "document 1 has 4 tokens in input_ids and 1 in labels"),
        ({"labels": None}, "labels is a NoneType"),
        (
            {"input_ids": [[1, 2, 3.5], IDS[1]]},
            "input_ids[0] is [1, 2, 3.5]; give a flat list, array or tens",
        ),
        ({"labels": [torch.tensor(x).float() for x in LABELS]}, "tensor of whole numbers, one a token"),
        ({"max_length": 3}, "input_ids[1] has 4 tokens and a row holds 3"),
        ({"labels": [np.array(x, np.uint8) for x in IDS]}, "label_pad_id -100 does not fit into numpy uint8"),
    ],
)
def test_columns_that_do_not_match(changed, says):
    columns = {"input_ids": IDS, "labels": LABELS, "attention_masks": MASKS}
    options = {"max_length": 8, "pad_token_id": 0}
    assert says in error_of(pack=concatenate_and_pack, **columns | options | changed)
