"""Several data sets as one: what comes how often, what is held out, and where every token went."""

import json
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
from tables import table

from unsloth_pack.data.mixture import MixedRows, Source, held_out, mix
from unsloth_pack.data.sources import ChosenRows, DataSet, open_stream
from unsloth_pack.data.streaming import Place, endless
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.data.tokenize import Documents, rows_hash
from unsloth_pack.errors import InputError

INTEGERS = datasets.List(datasets.Value("int32"))


def documents(numbers, masked=0):
    """A document for each number, of so many tokens more than `masked`, which carry no loss."""
    ids = [[number] * (masked + 1 + number % 3) for number in numbers]
    labels = [[-100] * masked + row[masked:] for row in ids]
    rows = datasets.Dataset.from_dict(
        {"input_ids": ids, "labels": labels},
        features=datasets.Features(dict.fromkeys(("input_ids", "labels"), INTEGERS)),
    )
    tokens = sum(map(len, ids))
    begin = 0 if masked else len(ids)
    ledger = TokenLedger(
        rows_read=len(ids) + 1,
        tokens_read=tokens + 7,
        rows_truncated=1,
        tokens_truncated=3,
        rows_fully_masked=1,
        tokens_dropped=4,
        tokens_masked_by_template=masked * len(ids),
        tokens_masked_at_boundaries=begin,
        tokens_counted=tokens - masked * len(ids) - begin,
        prompts_rerendered=0,
        longest=max(map(len, ids)),
        p99=max(map(len, ids)),
    )
    return Documents(rows, ledger, rows_hash(rows), 0, max(numbers))


def source(name, numbers, weight=1.0, masked=0):
    return Source(name, weight, documents(numbers, masked))


def numbers_of(made):
    return [row[0] for row in made.rows["input_ids"]]


def assert_adds_up(ledger, rows):
    """Every token that was read is in one place, and those that train are those of the rows."""
    elsewhere = (
        ledger.tokens_truncated + ledger.tokens_dropped + ledger.tokens_held_out + ledger.tokens_not_drawn
    )
    trained = ledger.tokens_masked_by_template + ledger.tokens_masked_at_boundaries + ledger.tokens_counted
    assert ledger.tokens_read + ledger.tokens_repeated == elsewhere + trained
    assert trained == sum(map(len, rows["input_ids"]))
    assert ledger.tokens_counted == sum(label != -100 for row in rows["labels"] for label in row[1:])


A, B = range(100, 140), range(200, 260)


@pytest.mark.parametrize(
    ("weight", "times"), [(2, {2: 40}), (0.5, {1: 20}), (1.25, {1: 30, 2: 10}), (3, {3: 40})]
)
def test_a_weight_says_how_often_documents_come(weight, times):
    made = mix([source("a", A, weight), source("b", B)], seed=5)
    counts = Counter(numbers_of(made.train))
    assert Counter(counts[number] for number in A if counts[number]) == times
    assert all(counts[number] == 1 for number in B)
    assert_adds_up(made.train.ledger, made.train.rows)
    assert mix([source("a", A, weight)], seed=5).train.ledger.rows_read == 41


@pytest.mark.parametrize("how", ["interleave_under", "interleave_over"])
def test_interleaved_is_what_datasets_interleaves(how):
    parts = [source("a", A, 3), source("b", B, 1)]
    ending = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}[how]
    theirs = datasets.interleave_datasets(
        [part.documents.rows for part in parts], [0.75, 0.25], seed=9, stopping_strategy=ending
    )
    made = mix(parts, how, seed=9)
    assert made.train.rows["input_ids"][:] == theirs["input_ids"][:]
    assert_adds_up(made.train.ledger, made.train.rows)


@table("how", ["concatenate", "interleave_under", "interleave_over"])
@table("seed", range(5))
def test_no_document_is_on_both_sides(how, seed):
    """Equal ones of other data sets included, and those that a weight repeats."""
    parts = [source("a", [*A, *A, *A[:5]], 2), source("b", [*B, *A[:10], *B[:3]])]
    made = mix(parts, how, seed=seed, eval_fraction=0.2)
    train, evaluation = set(numbers_of(made.train)), set(numbers_of(made.held_out))
    assert not train & evaluation
    if how != "interleave_under":
        assert train | evaluation == {*A, *B}
    assert 0.1 * 158 < len(made.held_out.rows) <= 0.2 * 158
    assert (
        made.train.ledger.rows_held_out
        == len(made.held_out.rows)
        == sum(part.held_out for part in made.parts)
    )
    assert_adds_up(made.train.ledger, made.train.rows)
    assert_adds_up(made.held_out.ledger, made.held_out.rows)


def test_what_is_held_out_depends_on_the_documents_and_the_seed():
    order = np.random.default_rng(0).permutation(40)
    rows = documents(A).rows
    chosen = held_out(rows, 0.25, 3)
    assert chosen.sum() == 10
    assert (held_out(rows.select(order), 0.25, 3) == chosen[order]).all()
    assert (held_out(rows, 0.25, 4) != chosen).any()


def test_many_equal_documents_do_not_overshoot():
    for seed in range(10):
        assert held_out(documents([1] * 90 + [*A[:10]]).rows, 0.05, seed).sum() == 5


# ---- streams


@pytest.fixture
def lines(tmp_path):
    def write(name, numbers):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"{number}"}) + "\n" for number in numbers))
        return open_stream(str(tmp_path / name))

    return write


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 60)
    monkeypatch.setattr("unsloth_pack.data.mixture._ROUND", 16)


def rows_from(stream, place=None, most=400):
    """Each of the rows from a place on, the number of its source and the place after its block."""
    found = []
    for block in endless(stream, place or Place()):
        if block.ends_pass:
            found.append(("end of pass", 0, block.end))
        else:
            rows = block.read(range(block.n_rows))
            found += [(int(text), block.part, block.end) for text in rows["text"]]
        if len(found) >= most:
            return found
    raise AssertionError


def one_pass(found):
    texts = [text for text, *_ in found]
    return texts[: texts.index("end of pass")]


HOW = ["concatenate", "interleave_under", "interleave_over"]


@pytest.mark.parametrize("how", HOW)
def test_a_stream_goes_on_at_any_place(how, lines, small_blocks):
    stream = MixedRows(
        [lines("a.jsonl", A), lines("b.jsonl", B), lines("c.jsonl", range(7))], [2, 1, 1], how, 3
    )
    whole = rows_from(stream)
    ends = [at for at in range(200) if whole[at][2] != whole[at + 1][2]]  # the others are within a block
    for at in ends[:: len(ends) // 20 or 1]:
        place = Place(**json.loads(json.dumps(whole[at][2].as_json())))
        again = rows_from(stream, place, 60)
        assert [row[:2] for row in again] == [row[:2] for row in whole[at + 1 :][: len(again)]]


def test_a_stream_that_interleaves_ends_where_datasets_would(lines, small_blocks):
    """With the draws of a round, a pass ends at the row with which a data set is used up."""
    streams = [lines("a.jsonl", A), lines("b.jsonl", B)]
    under = one_pass(rows_from(MixedRows(streams, [3, 1], "interleave_under", 3)))
    assert {*A} <= {*under}
    assert Counter(under).most_common(1)[0][1] == 1
    over = one_pass(rows_from(MixedRows(streams, [3, 1], "interleave_over", 3), most=1000))
    assert {*A, *B} == {*over}
    assert all(Counter(over)[number] == 1 for number in B)
    share = sum(number in A for number in over) / len(over)
    assert 0.6 < share < 0.9


def test_a_stream_draws_anew_in_every_pass_and_for_every_seed(lines, small_blocks):
    def passes(seed):
        stream = MixedRows([lines("a.jsonl", A), lines("b.jsonl", B)], [1, 1], "interleave_under", seed)
        found = rows_from(stream, most=300)
        return one_pass(found), one_pass(found[len(one_pass(found)) + 1 :])

    first, second = passes(3)
    assert first != second
    assert (first, second) == passes(3)
    assert first != passes(4)[0]


@pytest.mark.parametrize("limit", [7, 40])
def test_the_first_rows_of_a_stream(limit, lines, small_blocks):
    stream = ChosenRows(lines("a.jsonl", A), {}, limit)
    found = rows_from(stream, most=90)
    assert one_pass(found) == [*A[:limit]]
    ends = [at for at, row in enumerate(found[:-1]) if row[2] != found[at + 1][2]]
    for at in ends:
        again = [row[0] for row in rows_from(stream, found[at][2], 60)]
        wanted = [row[0] for row in found[at + 1 :]]
        n_rows = min(len(again), len(wanted))
        assert again[:n_rows] == wanted[:n_rows]


def test_a_mapped_column_that_a_later_row_lacks(tmp_path, small_blocks):
    rows = [{"words": "w", "id": 1}] * 20 + [{"words": "w"}] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data_set = DataSet(str(tmp_path / "rows.jsonl"), columns={"words": "text", "id": None})
    stream = ChosenRows(data_set.open(), data_set.columns, None)
    for block in stream.one_pass(Place()):
        assert block.read(range(block.n_rows)).column_names == ["text"]
    with pytest.raises(InputError, match=r"columns maps 'word', and there is no such column among words, id"):
        replace(data_set, columns={"word": "text"}).for_rows_with(["words", "id"])
