"""Descriptions of a packed row: what they mean, that they agree, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table
from tiny import every_description, positions_of

from unsloth_pack.errors import InputError
from unsloth_pack.layers.forward_call import ForwardCall, check_labels, refuse_counted_labels, take_row
from unsloth_pack.packed_row.describe import describe_row
from unsloth_pack.packed_row.row import PackedRow

CPU = torch.device("cpu")


def row_of(shape, labels=None, counted=False, **descriptions):
    """The row, whose labels are looked at as a model looks at them."""
    row = describe_row(shape, CPU, **descriptions)
    if labels is not None:
        check_labels("labels", labels, shape, n_outputs=256)
        if counted:
            refuse_counted_labels(ForwardCall(row, {}, {}), row, labels, False, -100)
    return row


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=20))
def test_all_descriptions_mean_the_same_row(lengths):
    for name, description in every_description(lengths).items():
        row = describe_row((1, sum(lengths)), CPU, **description)
        assert row.lengths == tuple(lengths), name
        assert row.positions.tolist() == positions_of(lengths).tolist()
        assert row.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
        assert row.token_mask is None
        assert row.longest == max(lengths)
        written = PackedRow.of_lengths(tuple(lengths), CPU)
        assert (row.is_padding, row.shape) == (written.is_padding, written.shape)


def test_a_keyword_that_is_nearly_one_of_a_row_is_refused():
    inputs = {"input_ids": torch.zeros(1, 5, dtype=torch.int64), "attention_mask": None}
    with pytest.raises(InputError, match="packed_seq_length is no argument of the model; do you mean"):
        take_row(inputs, {"packed_seq_length": [5]}, True)


def test_descriptions_on_a_device_come_apart_after_their_one_transfer(monkeypatch):
    monkeypatch.setattr("unsloth_pack.packed_row.describe.is_remote", lambda x: isinstance(x, torch.Tensor))
    transfers, to_cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(1) or to_cpu(x))
    lengths = [3, 1, 4, 2]
    for name, description in every_description(lengths).items():
        transfers.clear()
        row = describe_row((1, 10), CPU, **description)
        assert len(transfers) == any(map(torch.is_tensor, description.values()))
        assert row.lengths == tuple(lengths), name
        assert row.positions.tolist() == positions_of(lengths).tolist(), name
        assert row.positions.dtype == np.int64, name
    rows = {"packed_seq_lengths": torch.tensor([[2, 2], [3, 0]]), "attention_mask": torch.ones(2, 6)}
    rows["attention_mask"][0, 4:] = rows["attention_mask"][1, 3:] = 0
    assert describe_row((2, 6), CPU, **rows).lengths == (2, 2, 2, 3, 3)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=25))
def test_stacks_hold_every_token_once_and_never_mix_documents(lengths):
    row = PackedRow.of_lengths(tuple(lengths), CPU)
    document = np.repeat(np.arange(len(lengths)), lengths)
    stacks, unstack = row.stacks
    assert all(queries is keys for queries, keys in stacks)
    stacks = [queries for queries, _ in stacks]
    for stack in stacks:
        of_slot = document[stack.numpy()]
        assert (of_slot == of_slot[:, :1]).all()
        assert (np.diff(row.positions[stack.numpy()], axis=1) >= 0).all()
    tokens = torch.arange(sum(lengths))
    assert torch.equal(torch.cat([tokens[stack].flatten() for stack in stacks])[unstack], tokens)
    columns = torch.cat([torch.arange(stack.shape[1]).repeat(len(stack)) for stack in stacks])
    assert torch.equal(columns[unstack], row.position_ids)  # no filler stands for a token
    assert sum(stack.numel() for stack in stacks) <= 4 / 3 * sum(lengths) + len(lengths)


def test_a_row_on_another_device_shares_nothing_that_was_made_for_the_first():
    row = PackedRow.of_lengths((3, 2), CPU)
    assert row.once("of a layer", lambda: "on the cpu") == "on the cpu"
    moved = row.on(torch.device("meta"))
    assert moved.once("of a layer", lambda: "elsewhere") == "elsewhere"
    assert row.on(CPU) is row


def test_a_short_sum_leaves_a_padded_tail():
    row = describe_row((1, 10), CPU, packed_seq_lengths=[3, 4])
    assert row.lengths == (3, 4, 3)
    assert row.is_padding == (False, False, True)
    assert row.token_mask.tolist() == [[1] * 7 + [0] * 3]
    labels = torch.arange(1, 11)[None]
    assert row.mask_labels(labels).tolist() == [[-100, 2, 3, -100, 5, 6, 7, -100, -100, -100]]
    assert labels.tolist() == [list(range(1, 11))]  # a copy was masked


@pytest.mark.parametrize("numbers", [[0, 1, 2, 0], [5, 6, 7, 8]])
def test_what_numbers_every_token_numbers_the_padding_too(numbers):
    padding = torch.tensor(numbers)
    row = describe_row(
        (1, 11),
        CPU,
        packed_seq_lengths=[3, 4],
        position_ids=torch.cat([positions_of([3, 4]), padding])[None],
        seq_idx=torch.cat([torch.tensor([6] * 3 + [8] * 4), padding])[None],
    )
    assert (row.lengths, row.is_padding) == ((3, 4, 4), (False, False, True))
    assert row.positions.tolist() == positions_of([3, 4, 4]).tolist()


def test_several_rows_become_one():
    row = describe_row((2, 6), CPU, packed_seq_lengths=[[2, 4], [3]])
    assert row.lengths == (2, 4, 3, 3)
    assert row.is_padding == (False, False, False, True)
    assert row.token_mask.tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    padded = describe_row((2, 6), CPU, packed_seq_lengths=torch.tensor([[2, 4], [3, 0]]))
    assert padded.lengths == row.lengths
    empty = describe_row((2, 6), CPU, packed_seq_lengths=[[6], []])
    assert (empty.lengths, empty.is_padding) == ((6, 6), (False, True))
    with pytest.raises(InputError, match="max_length_q is 5 but packed_seq_lengths holds a document of 6"):
        describe_row((2, 6), CPU, packed_seq_lengths=[[6], [5]], max_length_q=5)


MEANS = [
    ((1, 10), {"packed_seq_lengths": [3, 4], "attention_mask": torch.ones(1, 10)}, (3, 4, 3), True),
    (
        (1, 10),
        {
            "position_ids": torch.tensor([[*range(3), *range(4), 0, 0, 0]]),
            "attention_mask": torch.tensor([[1] * 7 + [0] * 3]),
        },
        *((3, 4, 3), True),
    ),
    ((2, 6), {"seq_lengths": [[2, 4], [3]]}, (2, 4, 3, 3), True),
    *(
        ((1, 7), {"packed_seq_lengths": lengths}, (3, 4), False)
        for lengths in ([*torch.tensor([3, 4])], np.array([3, 4]))
    ),
    *(
        ((1, 7), {"cu_seq_lens_q": torch.tensor([[0, 3, 7]]), "max_length_q": longest}, (3, 4), False)
        for longest in (4, torch.tensor([9]))
    ),
    ((1, 7), {"cu_seq_lens_q": [0, 3, 3, 7]}, (3, 4), False),  # an empty document
    *(
        ((3, 6), {"position_ids": positions_of([2, 4]).expand(shape)}, (2, 4) * 3, False)
        for shape in ((3, 6), (1, 6), (6,))
    ),
]


@table(("shape", "description", "lengths", "has_tail"), MEANS, ids=[str(n) for n in range(len(MEANS))])
def test_what_a_description_means(shape, description, lengths, has_tail):
    row = describe_row(shape, CPU, **description)
    assert row.lengths == lengths
    assert {*map(type, row.lengths)} == {int}
    assert row.is_padding == (*[False] * (len(lengths) - 1), has_tail)


ORDINARY = [
    {},
    {"position_ids": torch.arange(6)[None]},
    {"position_ids": torch.arange(5, 11)[None]},
    {
        "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
    },
    {
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
    },
]


@table("ordinary", ORDINARY, ids=[str(n) for n in range(len(ORDINARY))])
def test_an_ordinary_batch_is_not_packed(ordinary):
    assert describe_row((1, 6), CPU, **ordinary) is None


def test_a_document_may_start_above_position_0():
    positions = torch.tensor([[5, 6, 7, 2, 3, 0]])
    row = describe_row((1, 6), CPU, position_ids=positions)
    assert row.lengths == (3, 2, 1)
    assert row.positions.tolist() == positions[0].tolist()


def disagree(value, **description):
    return description, "disagree", value, "make them agree"


def running_sum(ends):
    return {"cu_seq_lens_q": ends}, "cu_seq_lens_q", str(ends), "running sum"


def masked(*mask, what=None, value="[3, 4]", remedy="leave it out"):
    mask = torch.tensor([mask])
    return (
        {"packed_seq_lengths": [3, 4], "attention_mask": mask},
        what or f"keeps {mask.sum()}",
        value,
        remedy,
    )


def longest(what, value, **description):
    return description, what, value, "longest document"


ROW = {"packed_seq_lengths": [3, 4]}
TWO_ENDS = {"cu_seq_lens_q": [0, 3, 7]}
REFUSED = [
    ({"packed_seq_lengths": [3, 5]}, "[3, 5]", "7 tokens", "give the length"),
    ({"packed_seq_lengths": [8, -1]}, "row 0", "[8, -1]", "give the length"),
    ({"packed_seq_lengths": torch.tensor([3.0, 4.0])}, "packed_seq_lengths", "float32", "whole numbers"),
    ({"packed_seq_lengths": [0, 0]}, "hold no token", "[0, 0]", "give the length"),
    ({"packed_seq_lengths": [3, [4]]}, "packed_seq_lengths is", "[3, [4]]", "give the length"),
    *map(running_sum, ([0, 3, 9], [0, 0], [0.0, 3.5, 7.0], [1, 3, 7], [0, 4, 3, 7])),
    disagree("[3, 4]", **TWO_ENDS, cu_seq_lens_k=[0, 4, 7]),
    disagree("[3, 4]", packed_seq_lengths=torch.tensor([7]), position_ids=positions_of([3, 4])),
    disagree("[3, 2, 2]", **ROW, position_ids=torch.tensor([0, 1, 2, 0, 1, 5, 6])),
    disagree("[4, 3]", **ROW, seq_idx=[0, 0, 0, 0, 1, 1, 1]),
    (
        {"max_length_q": 4, "max_length_k": 4},
        "q is 4",
        "nothing says where documents end",
        "give cu_seq_lens_q",
    ),
    longest("max_length_k is 3", "4 tokens", **TWO_ENDS, max_length_q=4, max_length_k=3),
    longest("max_length_q is 3", "7 tokens", position_ids=torch.arange(7), max_length_q=3, max_length_k=3),
    ({**ROW, "labels": torch.zeros(1, 6)}, "labels have shape [1, 6]", "[1, 7]", "one label a token"),
    ({**ROW, "labels": [[1] * 7]}, "labels are", "list", "give a tensor"),
    *(
        (
            {"packed_seq_lengths": [3, 3], "labels": torch.tensor([labels]), "counted": True},
            *says,
            "in the collator",
        )
        for labels, *says in (
            ([1, 2, 3, 4, 5, 6, -100], "labels at document starts are counted", "-100"),
            ([1, 2, 3, -100, 5, 6, 7], "counted in num_items_in_batch", "-100"),
        )
    ),
    (
        {**ROW, "attention_mask": torch.ones(1, 1, 7, 7)},
        "attention_mask is [1, 1, 7, 7]",
        "[1, 7]",
        "leave it out",
    ),
    ({**ROW, "attention_mask": {"full": None}}, "attention_mask is dict", "[1, 7]", "leave it out"),
    masked(1, 1, 1, 1, 1, 0, 0),
    masked(0, 1, 1, 1, 1, 1, 1),
    masked(0, 0, 0, 0, 0, 0, 0, what="attention_mask keeps 0 tokens", value="row"),
    (
        {"position_ids": torch.arange(7), "attention_mask": torch.tensor([[1] * 4 + [2] * 3])},
        *("attention_mask", "[4, 3]", "give one of them"),
    ),
    ({"position_ids": torch.arange(6)}, "position_ids", "[6]", "one number a token"),
    (
        {"position_ids": torch.tensor([0, 1, 2, -1, 0, 1, 2])},
        "reach from",
        "-1",
        "start each document at 0",
    ),
    *(
        ({"seq_idx": [values]}, "seq_idx is", str(values)[:3], "one whole number a token")
        for values in ([0.0] * 3 + [0.5] * 4, ["a"] * 7)
    ),
]


@table(("description", "what", "value", "remedy"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_cannot_be_is_refused_in_one_line(description, what, value, remedy):
    with pytest.raises(InputError) as refusal:
        row_of((1, 7), **description)
    message = str(refusal.value)
    assert "\n" not in message
    for part in (what, value, remedy):
        assert part in message


def test_what_is_left_of_a_running_sum_that_was_cut_to_the_number_of_rows():
    """As accelerate's dispatcher of streamed rows cuts it; the other descriptions come whole."""
    cut = {"cu_seq_lens_q": torch.tensor([0]), "cu_seq_lens_k": torch.tensor([0])}
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    assert describe_row((1, 7), CPU, **cut, position_ids=positions).lengths == (3, 4)
    with pytest.raises(InputError, match=r"cu_seq_lens_q is \[0\] for"):
        describe_row((1, 7), CPU, **cut)


def test_labels_are_below_the_number_of_outputs():
    labels = torch.tensor([[-100, 0, 9]])
    assert torch.equal(check_labels("labels", labels, (1, 3), 10), labels)
    with pytest.raises(InputError, match=r"^labels reach from 0 to 9, the head has 9 outputs"):
        check_labels("labels", labels, (1, 3), 9)


def test_labels_without_loss_where_no_loss_is_are_no_contradiction():
    labels = torch.tensor([[1, 2, 3, -100, 5, 6, -100]])
    row = row_of((1, 7), packed_seq_lengths=[3, 3], labels=labels, counted=True)
    assert row.unscored_places.tolist() == [0, 3, 6]
    rows = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])  # nothing predicts the first label of a row
    counted = {"labels": rows, "counted": True}
    assert row_of((2, 4), packed_seq_lengths=[[2, 2], [4]], **counted).lengths == (2, 2, 4)
    uncounted = torch.arange(7)[None]  # nobody has counted them: they are masked
    assert row_of((1, 7), packed_seq_lengths=[3, 3], labels=uncounted).lengths == (3, 3, 1)
