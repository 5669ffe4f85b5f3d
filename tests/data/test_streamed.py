"""Streams of rows: read from any place, in any file, by every process its own share."""

import bz2
import csv
import gzip
import json
import lzma
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_folder import byte_tokenizer

from unsloth_pack.data.sources import load_rows, open_stream
from unsloth_pack.data.streaming import DocumentStream, IterableRows, Place, Share, endless
from unsloth_pack.errors import InputError

ROWS = [{"text": f"row {number} {'x' * (number % 90)}", "note": str(number)} for number in range(100)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 900)
    monkeypatch.setattr("unsloth_pack.data.streaming._ROWS", 7)
    monkeypatch.setattr("unsloth_pack.data.streaming._FIRST_ROWS", 20)


def open_zst(path, mode):
    return pa.CompressedOutputStream(str(path), "zstd")


OPENERS = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zst}


def write(path, rows=ROWS):
    """The rows in a file of the format that its name tells."""
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=13)
    elif path.name.endswith(".csv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.name.endswith(".txt"):
        path.write_text("\n\n".join(row["text"] for row in rows))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        suffix = path.suffix if path.suffix != ".jsonl" else ""
        with OPENERS[suffix](path, "wb") as file:
            file.write("\n".join(map(json.dumps, rows)).encode() + b"\n\n")
    return path


FILES = [f"rows.jsonl{suffix}" for suffix in OPENERS]
FILES += ["rows.parquet", "rows.csv", "rows.txt", "rows.json"]


def texts(blocks):
    return [row["text"] for b in blocks if b.n_rows for row in b.read(range(b.n_rows)).to_list()]


def saved(place):
    return Place(**json.loads(json.dumps(place.as_json())))


@pytest.mark.parametrize("name", FILES)
def test_a_stream_goes_on_at_any_place(name, tmp_path):
    source, wanted = open_stream(str(write(tmp_path / name))), [row["text"] for row in ROWS]
    blocks = list(source.one_pass(Place()))
    assert len(blocks) > 5
    assert texts(blocks) == wanted
    for block in blocks:
        assert texts(source.one_pass(saved(block.end))) == wanted[block.end.seen :]


def test_files_of_a_folder_follow_one_another(tmp_path):
    for number, suffix in enumerate(("", ".gz", ".zst")):
        write(tmp_path / f"part-{number}.jsonl{suffix}", ROWS[number * 30 : number * 30 + 30])
    write(tmp_path / "test.jsonl", ROWS[90:])
    wanted = [row["text"] for row in ROWS[:90]]
    for name in (str(tmp_path), str(tmp_path / "part-*")):
        source = open_stream(name)
        blocks = list(source.one_pass(Place()))
        assert texts(blocks) == wanted
        for block in blocks:
            assert texts(source.one_pass(saved(block.end))) == wanted[block.end.seen :]
    assert texts(open_stream(str(tmp_path), "test").one_pass(Place())) == [r["text"] for r in ROWS[90:]]


def hub(rows, kind, folder):
    if kind == "generated":
        return datasets.IterableDataset.from_generator(lambda: iter(rows))
    if kind == "shards":
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    path = write(folder / f"hub.{kind}", rows)
    name = "json" if kind == "jsonl" else kind
    return datasets.load_dataset(name, data_files=str(path), split="train", streaming=True)


@pytest.mark.parametrize("kind", ["generated", "shards", "jsonl", "parquet"])
def test_a_hub_data_set_is_read_as_it_comes(kind, monkeypatch, tmp_path):
    asked = []
    with monkeypatch.context() as patched:
        made = hub(ROWS, kind, tmp_path)
        patched.setattr(datasets, "load_dataset", lambda name, **options: asked.append(options) or made)
        source = open_stream("org/rows", "train")
    assert asked == [{"split": "train", "streaming": True}]
    assert isinstance(source, IterableRows)
    wanted = [row["text"] for row in ROWS]
    blocks = list(source.one_pass(Place()))
    assert texts(blocks) == wanted
    for block in blocks:
        assert texts(source.one_pass(saved(block.end))) == wanted[block.end.seen :]
    assert texts(islice(endless(source, Place()), len(blocks) + 3)) == (wanted + wanted)[: 100 + 14]


def documents(source, **changed):
    options = {"vocab_size": 258, "max_length": 64, "responses_only": False, "chat_template": None}
    return DocumentStream(source, byte_tokenizer(), **{**options, **changed})


def one_pass_of(stream, share, workers=1):
    """The documents of a share, and the tally, as a loader gives them when its workers take turns."""
    readers = [stream.blocks(Place(), share, worker, workers) for worker in range(workers)]
    found, rows = [], 0
    for turn in range(10_000):
        block = next(readers[turn % workers])
        if block.ends_pass:
            return found, rows
        found += [tuple(document["input_ids"].tolist()) for document in block.documents()]
        rows += block.tally.sums["rows_read"]
    raise AssertionError("the pass has no end")


@pytest.mark.parametrize(("name", "processes"), [("rows.jsonl.gz", 3), ("rows.parquet", 8)])
def test_every_process_takes_its_own_rows(name, processes, tmp_path):
    stream = documents(open_stream(str(write(tmp_path / name))))
    whole, _ = one_pass_of(stream, Share())
    assert len(whole) == 100
    shares = [one_pass_of(stream, Share(number, processes)) for number in range(processes)]
    assert sum(rows for _, rows in shares) == 100
    assert sorted(document for found, _ in shares for document in found) == sorted(whole)
    for workers in (2, 5):
        assert one_pass_of(stream, Share(1 % processes, processes), workers) == shares[1 % processes]


def test_documents_are_those_of_the_data_set_as_a_whole(tmp_path):
    from unsloth_pack.run.documents import DocumentPreparation

    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a" * (n % 80)}]}
        for n in range(1, 60)
        if n % 80
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    template = byte_tokenizer().chat_template
    stream = documents(open_stream(str(path)), responses_only=True, chat_template=template)
    whole = DocumentPreparation(byte_tokenizer(), 64, True).documents(load_rows(str(path)))
    found, labels = [], []
    for block in islice(stream.blocks(Place(), Share()), 100):
        if block.ends_pass:
            break
        for document in block.documents():
            found.append(document["input_ids"].tolist())
            labels.append(document["labels"].tolist())
    assert found == whole.rows["input_ids"][:]
    assert labels == whole.rows["labels"][:]
    assert stream.first_ledger.rows_read >= 20


def test_a_process_without_a_row_in_one_pass_has_one_in_the_next(tmp_path):
    stream = documents(open_stream(str(write(tmp_path / "rows.jsonl", ROWS[:1]))))
    for number in range(3):
        found = [len(list(b.documents())) for b in islice(stream.blocks(Place(), Share(number, 3)), 6)]
        assert sum(found) == 1


def test_short_blocks_are_shared_out_too(tmp_path, monkeypatch):
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 1)  # a line a block
    stream = documents(open_stream(str(write(tmp_path / "rows.jsonl", ROWS[:12]))))
    assert [one_pass_of(stream, Share(number, 3))[1] for number in range(3)] == [4, 4, 4]


def refusal(source, **changed):
    with pytest.raises(InputError) as raised:
        one_pass_of(documents(source, **changed), Share())
    return str(raised.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"text": ', "line 51, column 10: not valid JSON"),
        ('{"note": "n"}', "row 50, column 'text': expected a string, got None"),
        (b'{"text": "\xff"}', "byte 0xff is not UTF-8"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "rows 50 to 50 have the format messages"),
    ],
)
def test_a_bad_row_is_named(bad, message, tmp_path, monkeypatch):
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 1)  # a line a block
    path = write(tmp_path / "rows.jsonl", ROWS[:50])
    line = bad if isinstance(bad, bytes) else bad.encode()
    path.write_bytes(path.read_bytes().rstrip() + b"\n" + line + b"\n")
    said = refusal(open_stream(str(path)))
    assert message in said
    assert str(path) in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_that_has_changed_before_the_place_is_refused(name, tmp_path):
    path = write(tmp_path / name)
    source = open_stream(str(path))
    place = list(source.one_pass(Place()))[4].end
    for rows in (ROWS[:3], [{"text": "y", "note": ""}, *ROWS]):
        write(path, rows)
        with pytest.raises(InputError, match="has changed since it was read last"):
            list(source.one_pass(place))
    path.rename(tmp_path / "other.jsonl")
    with pytest.raises(InputError, match=f"{name}, in which the run stopped, is gone"):
        list(open_stream(str(tmp_path)).one_pass(place))


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match=r"rows 0 to \d+: token id 256 is outside the vocabulary, 0 to 255"):
        documents(open_stream(str(path)), vocab_size=256)
