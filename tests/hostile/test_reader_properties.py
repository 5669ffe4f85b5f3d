"""Properties for any bytes and rows: a file is read as written or refused, a row is described as it is.

500 examples an area by default, 20,000 and more with `-m nightly`.
"""

import csv
import io
import itertools
import json
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folder import byte_tokenizer

from unsloth_pack.data import load_rows
from unsloth_pack.data.formats import Conversion
from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.describe import describe_row
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.run.documents import DocumentPreparation

CPU = torch.device("cpu")
FORMATS = ("json", "jsonl", "csv", "parquet", "txt")
WRITABLE = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXT = st.text(WRITABLE, max_size=30)


def refused(error):
    """A refusal holds a remedy."""
    assert "; " in str(error)


def read(suffix, data):
    """What `load_rows` makes of a file of these bytes, or None where it refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"rows.{suffix}")
        path.write_bytes(data)
        try:
            return load_rows(str(path))
        except InputError as error:
            refused(error)
            return None
        finally:
            assert path.read_bytes() == data


# ---- readers

WHOLE = '[{"instruction": "Say café.", "output": "café"}, {"instruction": "b", "output": "c, d"}]'


def whole(suffix):
    rows = json.loads(WHOLE)
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    cells = 'instruction,output\nSay café.,café\nb,"c, d"\n'
    texts = {"json": WHOLE, "jsonl": lines, "csv": cells, "txt": "café\n\nb c"}
    return texts[suffix].encode() if suffix in texts else file.getvalue()


WHOLE_FILES = {suffix: whole(suffix) for suffix in FORMATS}


@st.composite
def damaged(draw):
    """A whole file with bytes changed, put in, left out or cut off."""
    suffix = draw(st.sampled_from(FORMATS))
    data = bytearray(WHOLE_FILES[suffix])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.integers(0, 12)))
        data[place:end] = draw(st.binary(max_size=8))
    return suffix, bytes(data[: draw(st.integers(0, len(data)) | st.just(len(data)))])


def any_bytes_are_rows_or_refused(case):
    suffix, data = case
    rows = read(suffix, data)
    if rows is not None:
        assert len(rows)
        try:
            assert len(list(Conversion(rows, chat_template=True).rows(0, len(rows), 9))) == len(rows)
        except InputError as error:
            refused(error)


EQUALS = st.sampled_from([1, 1.0, True, 0, 0.0, -0.0, False])  # that are written otherwise
KEYS = st.sampled_from("ab") | TEXT
VALUES = st.recursive(
    TEXT
    | EQUALS
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def objects(draw):
    names = draw(st.lists(TEXT, min_size=1, max_size=4, unique=True))
    kinds = st.sampled_from([VALUES, EQUALS, st.dictionaries(st.sampled_from("ab"), EQUALS)])
    columns = {name: draw(kinds) for name in names}
    return draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=5))


def json_is_read_as_written(rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for suffix, text in (("jsonl", lines), ("json", json.dumps(rows, ensure_ascii=False))):
        assert shown(read(suffix, text.encode())) == shown(rows)


def shown(rows):
    """Every column as text, because 1 == 1.0 == True, and objects are equal in any order of their keys."""
    return [{name: json.dumps(value) for name, value in row.items()} for row in rows]


ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)
KWARGS = st.dictionaries(st.sampled_from(["x_a", "x_b"]), VALUES)


@st.composite
def conversations(draw):
    """Rows whose calls, tools and template variables hold anything, or are absent, or null."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        call = {"function": {"name": "f", "arguments": draw(ARGUMENTS)}, "id": draw(st.none() | TEXT)}
        turns = [
            {"role": "user", "content": draw(TEXT)},
            {"role": "assistant", "content": draw(st.none() | TEXT), "tool_calls": [call]},
        ]
        row = {"messages": [dict(draw(st.permutations(list(turn.items())))) for turn in turns]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": draw(ARGUMENTS)}}]
        beside = {"tools": draw(st.none() | st.just(tools)), "chat_template_kwargs": draw(KWARGS)}
        rows.append(row | {name: beside[name] for name in draw(st.sets(st.sampled_from(sorted(beside))))})
    return rows


EVERYTHING = byte_tokenizer(
    "{{ messages | tojson }}{{ tools | tojson }}{{ x_a | tojson if x_a is defined }}"
    "{{ x_b | tojson if x_b is defined }}"
)


def templates_see_what_was_written(rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    documents = DocumentPreparation(EVERYTHING, 2**20).documents(read("jsonl", lines.encode())).rows
    expected = [
        EVERYTHING.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False, **row.get("chat_template_kwargs", {})
        )
        for row in map(json.loads, lines.splitlines())
    ]
    assert EVERYTHING.batch_decode(documents["input_ids"][:]) == expected


CELLS = st.text(WRITABLE, max_size=20).filter(lambda text: text == text.strip("\ufeff"))


@st.composite
def string_tables(draw):
    names = draw(st.lists(CELLS.filter(str.strip), min_size=2, max_size=4, unique=True))
    return names, draw(st.lists(st.tuples(*[CELLS] * len(names)), min_size=1, max_size=6))


def strings_are_read_as_written(case):
    names, cells = case
    expected = [dict(zip(names, row, strict=True)) for row in cells]
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([names, *cells])
    assert read("csv", file.getvalue().encode()).to_list() == expected
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(expected), parquet)
    assert read("parquet", parquet.getvalue()).to_list() == expected


LINES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=20)


def paragraphs_are_read_as_written(documents):
    texts = ["\n".join(lines) for lines in documents]
    expected = texts if len(texts) > 1 else documents[0]
    assert read("txt", "\n\n".join(texts).encode())["text"][:] == [text.lstrip("\ufeff") for text in expected]


# ---- the packed row, and descriptions of it

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=25)


def a_row_holds_every_token_once(lengths):
    row = PackedRow.of_lengths(tuple(lengths), CPU)
    n = sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    assert row.n_tokens == n
    assert row.longest == max(lengths)
    assert row.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    assert row.starts.tolist() == [int(np.argmax(document == i)) for i in range(len(lengths))]
    assert row.positions.tolist() == [i for length in lengths for i in range(length)]
    assert row.unscored_places.tolist() == row.starts.tolist()
    tokens = torch.arange(n)
    stacks, unstack = row.stacks
    for stack, _ in stacks:
        assert (document[stack.numpy()] == document[stack.numpy()][:, :1]).all()
    assert torch.equal(torch.cat([tokens[stack].flatten() for stack, _ in stacks])[unstack], tokens)
    labels = row.mask_labels(tokens + 1)
    assert (labels == -100).sum() == len(lengths)


def a_static_row_is_the_row_it_was_filled_with(case):
    lengths, spare, segments = case
    row = PackedRow.of_lengths(tuple(lengths), CPU)
    longest = max(lengths)
    n_tokens = row.n_tokens + spare
    needed = len(lengths) + -(-spare // longest)
    static = PackedRow.static(n_tokens, needed + segments, longest, CPU)
    static.fill(row)
    cu = static.cu_seqlens.tolist()
    assert cu[: len(lengths) + 1] == row.cu_seqlens.tolist()
    assert cu[-1] == n_tokens
    assert all(0 <= end - start <= longest for start, end in itertools.pairwise(cu))
    assert static.position_ids.tolist()[: row.n_tokens] == row.positions.tolist()


@st.composite
def descriptions(draw):
    """A row of documents, a tail, and one or several ways to say so."""
    lengths, tail = draw(LENGTHS), draw(st.integers(0, 9))
    cu = [0, *np.cumsum(lengths).tolist()]
    padded = [*lengths, tail] if tail else lengths
    positions = torch.cat([torch.arange(length) for length in padded])[None]
    numbers = torch.arange(len(padded)).repeat_interleave(torch.tensor(padded))[None]
    ways = {
        "packed_seq_lengths": draw(
            st.sampled_from([lengths, torch.tensor(lengths), np.array(lengths), [lengths]])
        ),
        "seq_lengths": [lengths],
        "cu_seq_lens_q": draw(st.sampled_from([cu, torch.tensor(cu, dtype=torch.int32)])),
        "cu_seq_lens_k": cu,
        "max_length_q": max(lengths),
        "position_ids": positions,
        "seq_idx": numbers,
    }
    lead = draw(st.sampled_from(["packed_seq_lengths", "seq_lengths", "cu_seq_lens_q"]))
    others = draw(st.sets(st.sampled_from(sorted(ways))))
    return lengths, tail, {name: ways[name] for name in ways if name in others | {lead}}


def ways_that_agree_give_the_row(case):
    lengths, tail, ways = case
    row = describe_row((1, sum(lengths) + tail), CPU, **ways)
    assert row.lengths == (*lengths, tail) if tail else row.lengths == tuple(lengths)
    assert row.is_padding == (False,) * len(lengths) + (True,) * bool(tail)


NUMBERS = st.integers(-3, 30) | st.integers(-(2**70), 2**70) | st.floats() | st.none() | TEXT | st.booleans()
LIES = st.lists(NUMBERS, max_size=8) | st.lists(st.lists(NUMBERS, max_size=4), max_size=3) | NUMBERS


@st.composite
def lies(draw):
    names = ("packed_seq_lengths", "seq_lengths", "cu_seq_lens_q", "cu_seq_lens_k")
    said = {name: draw(LIES) for name in draw(st.sets(st.sampled_from(names), min_size=1))}
    if draw(st.booleans()):
        said["max_length_q"] = draw(NUMBERS)
    return draw(st.integers(1, 30)), said


def what_is_not_refused_fits_the_row(case):
    n_tokens, said = case
    try:
        row = describe_row((1, n_tokens), CPU, **said)
    except InputError as error:
        return refused(error)
    if row is not None:
        assert sum(row.lengths) == n_tokens
        assert min(row.lengths) > 0
        assert max(row.positions) < n_tokens


AREAS = {
    "readers": {
        any_bytes_are_rows_or_refused: damaged()
        | st.tuples(st.sampled_from(FORMATS), st.binary(max_size=200)),
        json_is_read_as_written: objects(),
        templates_see_what_was_written: conversations(),
        strings_are_read_as_written: string_tables(),
        paragraphs_are_read_as_written: st.lists(
            st.lists(LINES, min_size=1, max_size=3), min_size=1, max_size=4
        ),
    },
    "layout": {
        a_row_holds_every_token_once: LENGTHS,
        a_static_row_is_the_row_it_was_filled_with: st.tuples(LENGTHS, st.integers(0, 99), st.integers(0, 5)),
        ways_that_agree_give_the_row: descriptions(),
        what_is_not_refused_fits_the_row: lies(),
    },
}
PROPERTIES = [(area, holds) for area, properties in AREAS.items() for holds in properties]


def check(area, holds, examples):
    datasets.disable_progress_bars()
    share = -(-examples // len(AREAS[area]))
    settings(max_examples=share, deadline=None, database=None)(given(AREAS[area][holds])(holds))()


@pytest.mark.parametrize(("area", "holds"), PROPERTIES)
def test_holds(area, holds):
    check(area, holds, 500)


@pytest.mark.nightly
@pytest.mark.parametrize(("area", "holds"), PROPERTIES)
def test_holds_nightly(area, holds):
    check(area, holds, 20_000)
