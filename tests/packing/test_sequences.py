"""pack_sequences and concatenate_and_pack: exact rows, the kinds of the results, errors for bad input."""

import gc
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
    "tuple": tuple,
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


@table("strategy", ["next_fit", "first_fit", "ffd", "bfd"])
@table("separator", [None, 99])
def test_every_kind_gives_the_same_rows(strategy, separator):
    options = {"strategy": strategy, "sep_token_id": separator}
    packed = [
        as_lists(pack_sequences([make(x) for x in SEQUENCES], 8, 0, **options)) for make in KINDS.values()
    ]
    assert all(rows == packed[0] for rows in packed)


def test_the_kind_that_came_in_comes_out():
    assert [type(row) for row in pack_sequences([(1, 2), (3,)], 4, 0)] == [list]
    array = pack_sequences([KINDS["numpy"](x) for x in SEQUENCES], 8, 0)
    assert (type(array), array.dtype, array.shape) == (np.ndarray, np.int32, (2, 8))
    tensor = pack_sequences([KINDS["torch"](x) for x in SEQUENCES], 8, 0)
    assert (type(tensor), tensor.dtype, tuple(tensor.shape)) == (torch.Tensor, torch.int32, (2, 8))
    floats = pack_sequences([torch.tensor([0.5, 0.25])], 3, 0.0)
    assert torch.equal(floats, torch.tensor([[0.5, 0.25, 0.0]]))


def test_two_dimensional_input_and_no_sequences():
    assert pack_sequences(np.array([[1, 2], [3, 4]]), 5, 0).tolist() == [[1, 2, 3, 4, 0]]
    assert pack_sequences(torch.tensor([[1, 2], [3, 4]]), 5, 0).tolist() == [[1, 2, 3, 4, 0]]
    assert pack_sequences(np.zeros((0, 3), np.int16), 5, 0).shape == (0, 5)
    assert pack_sequences([], 5, 0) == []
    assert pack_sequences([], 5, 0, return_boundaries=True) == ([], [])
    assert pack_sequences(iter([[1], [2]]), 2, 0) == [[1, 2]]


@table("kind", KINDS)
@table("separator", [None, 99])
def test_empty_sequences_are_no_documents(kind, separator):
    options = {"sep_token_id": separator, "return_boundaries": True, "return_counts": True}
    rows, *others = pack_sequences([KINDS[kind]([])] * 2, 4, 0, **options)
    assert (as_lists(rows), *others) == ([], [], CutCounts(empty=2))
    sequences = [KINDS[kind](x) for x in ([1, 2], [], [3])]
    rows, boundaries, counts = pack_sequences(sequences, 4, 0, **options)
    assert as_lists(rows) == ([[1, 2, 3, 0]] if separator is None else [[1, 2, 99, 3]])
    assert boundaries == ([(0, 0, 2), (0, 2, 3)] if separator is None else [(0, 0, 2), (0, 3, 4)])
    assert counts == CutCounts(empty=1)


def test_length_one_and_new_rows():
    sequence = [1, 2]
    rows = pack_sequences([sequence, [3], [4]], 2, 0)
    rows[0][0] = 9
    assert (rows, sequence) == ([[9, 2], [3, 4]], [1, 2])


def test_garbage_collection_is_as_it_was():
    gc.disable()
    try:
        pack_sequences(SEQUENCES, 8, 0)
        assert not gc.isenabled()
    finally:
        gc.enable()
    pack_sequences(SEQUENCES, 8, 0)
    assert gc.isenabled()


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
    with pytest.warns(PackingWarning, match="pack_sequences: 1 empty dropped, 1 over-long") as caught:
        pack_sequences(sequences, 4, 0, overlong=overlong)
    assert caught[0].filename == __file__


def test_overlong_is_an_error_unless_asked():
    message = error_of([[1], [1] * 9], 8, 0)
    assert message.startswith("sequences[1] has 9 tokens and a row holds 8; raise the length of a row")
    message = error_of([[1]], 8, 0, overlong="cut")
    assert "overlong is 'cut'; choose one of error, truncate, drop, split" in message


# ---- bad input


@table(
    ("sequences", "says"),
    [
        ([1, 2, 3], "sequences[0] is a int; give a list"),
        ([[1], None], "sequences[1] is a NoneType"),
        (["text"], "sequences[0] is a str"),
        ("text", "sequences is a str; give a list of token sequences"),
        (7, "sequences is a int"),
        ({"input_ids": [[1]]}, "sequences is a dict"),
        ([[1], [[2]]], "sequences[1] holds [2] at place 0; give numbers, one a token"),
        ([[1], np.array([2])], "sequences[1] is numpy int64 and sequences[0] is list"),
        (
            [np.array([1]), np.array([2], np.int32)],
            "sequences[1] is numpy int32 and sequences[0] is numpy int64",
        ),
        ([torch.tensor([1]), torch.tensor([2.0])], "sequences[1] is torch torch.float32"),
        ([np.array([[1]])], "sequences[0] has shape (1, 1); give one flat sequence"),
        (np.array([1, 2]), "sequences[0] is a int64"),
        (torch.tensor([1, 2]), "sequences[0] has shape ()"),
        (torch.tensor(3), "sequences is a single number"),
        ([np.array(["a"])], "sequences[0] is an array of <U1; give numbers"),
        ([[1], [2, None]], "sequences[1] holds None at place 1; give numbers, one a token"),
        ([[1], [2, "a"]], "sequences[1] holds 'a' at place 1; give numbers"),
        ([np.array([1, None])], "sequences[0] is an array of object; give numbers"),
    ],
)
def test_what_is_no_list_of_sequences(sequences, says):
    assert says in error_of(sequences, 8, 0)


@table("kind", KINDS)
@table("pad", [None, "0", True])
def test_padding_that_is_no_number(kind, pad):
    sequences = [KINDS[kind]([1])]
    assert f"pad_token_id is {pad!r}; give a number" in error_of(sequences, 8, pad)
    if pad is not None:
        assert f"sep_token_id is {pad!r}" in error_of(sequences, 8, 0, sep_token_id=pad)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize(("dtype", "pad"), [("uint8", -100), ("int16", 50256), ("int32", 0.5)])
def test_padding_that_the_type_cannot_hold(make, dtype, pad):
    sequences = [make([1], dtype=getattr(np if make is np.array else torch, dtype))]
    assert f"pad_token_id {pad} does not fit into" in error_of(sequences, 8, pad)


# ---- three columns


def test_three_columns():
    packed = concatenate_and_pack(IDS, LABELS, MASKS, max_length=8, pad_token_id=0, label_pad_id=-100)
    assert packed == (
        [[1, 2, 3, 4, 5, 6, 7, 0]],
        [[-100, 2, 3, -100, -100, 6, 7, -100]],
        [[1, 1, 1, 1, 1, 1, 1, 0]],
    )


def test_each_column_keeps_its_kind():
    ids, labels, masks = concatenate_and_pack(
        [torch.tensor(x) for x in IDS], [np.array(x) for x in LABELS], MASKS, max_length=5, pad_token_id=7
    )
    assert torch.equal(ids, torch.tensor([[1, 2, 3, 7, 7], [4, 5, 6, 7, 7]]))
    assert labels.tolist() == [[-100, 2, 3, -100, -100], [-100, -100, 6, 7, -100]]
    assert masks == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]


def test_three_columns_cut_alike():
    packed = concatenate_and_pack(
        [[], *IDS],
        [[], *LABELS],
        [[], *MASKS],
        max_length=3,
        pad_token_id=0,
        overlong="split",
        return_counts=True,
    )
    assert packed == (
        [[1, 2, 3], [4, 5, 6], [7, 0, 0]],
        [[-100, 2, 3], [-100, -100, 6], [7, -100, -100]],
        [[1, 1, 1], [1, 1, 1], [1, 0, 0]],
        CutCounts(empty=1, split=1),
    )
    with pytest.warns(PackingWarning, match="concatenate_and_pack: 1 over-long truncated") as caught:
        concatenate_and_pack(IDS, LABELS, MASKS, max_length=3, pad_token_id=0, overlong="truncate")
    assert caught[0].filename == __file__


@table(
    ("changed", "says"),
    [
        ({"labels": LABELS[:1]}, "input_ids has 2 documents and labels has 1"),
        ({"attention_masks": [*MASKS, [1]]}, "input_ids has 2 documents and attention_masks has 3"),
        ({"labels": [[1, 2, 3], [4]]}, "input_ids[1] has 4 tokens and labels[1] has 1"),
        ({"labels": None}, "labels is a NoneType"),
        ({"input_ids": [[1, 2, 3], [4, None, 6, 7]]}, "input_ids[1] holds None at place 1; give whole"),
        ({"input_ids": [[1, 2, 3.5], IDS[1]]}, "input_ids[0] holds 3.5 at place 2; give whole numbers"),
        ({"labels": [LABELS[0], [-100, -100, 6.0, 7]]}, "labels[1] holds 6.0 at place 2"),
        (
            {"attention_masks": [[1, 1, 1], [1, 1, None, 1]]},
            "attention_masks[1] holds None at place 2; give numbers",
        ),
        ({"input_ids": [np.array(x, np.float32) for x in IDS]}, "input_ids[0] holds float32; give whole"),
        ({"labels": [torch.tensor(x).float() for x in LABELS]}, "labels[0] holds torch.float32; give whole"),
        ({"max_length": 3}, "input_ids[1] has 4 tokens and a row holds 3"),
        ({"max_length": 0}, "max_length is 0; give a whole number of at least 1"),
        (
            {"label_pad_id": -100, "labels": [np.array([1], np.uint8)] * 2},
            "label_pad_id -100 does not fit into numpy uint8",
        ),
    ],
)
def test_columns_that_do_not_match(changed, says):
    columns = {
        "input_ids": IDS,
        "labels": LABELS,
        "attention_masks": MASKS,
        "max_length": 8,
        "pad_token_id": 0,
    }
    assert says in error_of(pack=concatenate_and_pack, **columns | changed)


def test_lists_of_numpy_numbers_whose_sum_overflows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, *_ = concatenate_and_pack(
            [[np.int8(100)] * 3], [[1] * 3], [[1] * 3], max_length=4, pad_token_id=0
        )
        assert rows == [[100, 100, 100, 0]]
