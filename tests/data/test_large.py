"""Data too large to be held: read in parts, tokenised in spans, kept in the cache. The same comes out."""

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from model_folder import TEMPLATE, byte_tokenizer
from tables import table

from unsloth_pack.data import load_rows, rows_hash
from unsloth_pack.data.cache import from_cache, in_order
from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.packing import pack_dataset
from unsloth_pack.packing.dataset import pack_documents
from unsloth_pack.run.documents import DocumentPreparation

WORDS = ["one", "zwei", "drei\nund", "é😀", "five " * 9]
ALPACA = [{"instruction": WORDS[i % 5], "input": "", "output": f"{i} {WORDS[i % 3]}"} for i in range(40)]
TURNS = [
    {
        "messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": WORDS[i % 5]}],
        **({"tools": [{"name": "f", "n": i / 3}]} if i > 30 else {}),
    }
    for i in range(40)
]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
MIXED = [
    {"text": f"{i}", "x": [None, 1, "a", 1.5, [], ["b"], {"k": 0.6}][i % 7 if i > 20 else 0]}
    for i in range(40)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def read_little(patch):
    """Parts of 100 bytes, read 16 bytes at a time."""
    for module in ("text_files", "files"):
        patch.setattr(f"unsloth_pack.data.{module}.PART", 100)
    patch.setattr("unsloth_pack.data.text_files._BLOCK", 16)
    patch.setattr("unsloth_pack.data.text_files._ROWS_AT_A_TIME", 3)


@pytest.fixture
def large(monkeypatch):
    """Makes everything too large to be held."""

    def make():
        monkeypatch.setattr("unsloth_pack.data.files._SMALL", 0)
        read_little(monkeypatch)
        monkeypatch.setattr("unsloth_pack.data.cache._ROWS", 3)
        monkeypatch.setattr("unsloth_pack.data.tokenize._ROWS_A_BATCH", 2)

    return make


@pytest.fixture
def whole(monkeypatch):
    """What `load_rows` gives, or its error, once held in memory and once in parts."""

    def load(path):
        try:
            rows = load_rows(str(path))
        except InputError as error:
            return str(error)
        return list(rows), rows.features

    def both(path):
        held = load(path)
        with monkeypatch.context() as patch:
            patch.setattr("unsloth_pack.data.files._SMALL", 0)
            read_little(patch)
            in_parts = load(path)
        return held, in_parts

    return both


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@table("rows", [ALPACA, TURNS, MIXED], ids=["alpaca", "turns", "mixed"])
@table(
    ("name", "as_text"),
    [
        ("a.jsonl", jsonl),
        ("a.json", lambda rows: "\ufeff " + json.dumps(rows, indent=2, ensure_ascii=False)),
    ],
)
def test_json_in_parts_holds_the_same_rows(name, as_text, rows, whole, tmp_path):
    held, in_parts = whole(write(tmp_path / name, as_text(rows)))
    assert in_parts == held
    assert [{k: v for k, v in row.items() if v is not None} for row in in_parts[0]] == [
        {k: v for k, v in row.items() if v is not None} for row in rows
    ]


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACKED[".zst"] = lambda content: pa.compress(content, "zstd", asbytes=True)


@table("suffix", PACKED)
@table(
    ("name", "content"),
    [
        ("a.jsonl", "\ufeff" + jsonl(ALPACA)),
        ("a.txt", "one\r\ntwo\n\nthree\n" * 20),
        ("a.jsonl", jsonl(ALPACA).encode() + b"\xe9\n"),
        ("a.txt", ""),
    ],
)
def test_a_compressed_file_is_read_as_what_it_holds(name, content, suffix, whole, tmp_path):
    plain = write(tmp_path / name, content)
    expected, _ = whole(plain)
    packed = write(tmp_path / f"{name}{suffix}", PACKED[suffix](plain.read_bytes()))
    for found in whole(packed):
        assert found == (expected.replace(str(plain), str(packed)) if isinstance(expected, str) else expected)


def test_errors_in_a_later_part_name_the_same_place(whole, tmp_path, cache):
    for name, content, says in (
        ("a.jsonl", jsonl(ALPACA) + '{"text" 1}\n', "a.jsonl line 41, column 9: not valid JSON"),
        ("a.csv", "a,b\n" + "1,2\n" * 60 + "3\n", "a.csv line 62: 1 cells under 2 columns"),
    ):
        held, in_parts = whole(write(tmp_path / name, content))
        assert in_parts == held
        assert says in in_parts
    assert not list(cache.rglob("*.arrow"))


# ---- documents


def documents(path, num_proc=1, max_length=400, tokenizer=None, **more):
    tokenizer = tokenizer or byte_tokenizer(WITH_TOOLS)
    prepare = DocumentPreparation(tokenizer, max_length, num_proc=num_proc, **more)
    return prepare.documents(load_rows(str(path), num_proc=num_proc))


def told(made):
    return made.ledger, made.fingerprint, made.least_id, made.last_id, made.rows.to_list()


@pytest.mark.parametrize(
    ("rows", "only_responses"), [(ALPACA, False), (TURNS, True)], ids=["alpaca", "turns"]
)
def test_any_number_of_processes_gives_the_same_documents(rows, only_responses, large, tmp_path, cache):
    path = write(tmp_path / "a.jsonl", jsonl(rows))
    held = documents(path, max_length=30, train_on_responses_only=only_responses)
    assert not held.rows.cache_files
    assert held.ledger.rows_fully_masked or rows is TURNS
    assert held.ledger.rows_truncated
    large()
    for num_proc in (1, 3):
        made = documents(path, num_proc, 30, train_on_responses_only=only_responses)
        assert told(made) == told(held)
        assert made.rows.cache_files
        assert made.fingerprint == rows_hash(made.rows)
        packed = pack_documents(made, 64, num_proc)
        assert packed.to_list() == pack_dataset(held.rows, 64).to_list()
        assert packed.cache_files
        for folder in cache.rglob("*-*"):
            assert folder.suffix != ".aside"
        subprocess.run(["rm", "-r", str(cache)], check=True)


def test_a_bad_row_is_named_by_its_number_in_the_data(large, tmp_path, cache):
    """The first of two, though a process may come upon the other one earlier."""
    rows = [dict(row) for row in ALPACA]
    rows[17]["output"] = rows[38]["output"] = " "
    large()
    with pytest.raises(InputError, match="row 17, column 'output': expected some text"):
        documents(write(tmp_path / "a.jsonl", jsonl(rows)), 3)
    weighted = [row | {"weight": 1 if i < 23 else 0.5} for i, row in enumerate(ALPACA)]
    with pytest.raises(InputError, match="row 23, column 'weight'"):
        documents(write(tmp_path / "b.jsonl", jsonl(weighted)), 3)
    assert not list(cache.rglob("documents-*.aside"))
    assert not [path for path in cache.rglob("documents-*") if path.is_dir()]


def test_a_second_run_reads_and_tokenises_nothing(large, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", jsonl(ALPACA))
    large()
    first = told(documents(path))
    pack_documents(documents(path), 128)

    def never(*args, **kwargs):
        raise AssertionError("it is done already")

    monkeypatch.setattr("unsloth_pack.data.encoding.Encoder.__call__", never)
    monkeypatch.setattr("unsloth_pack.data.text_files.rows_of_lines", never)
    monkeypatch.setattr("unsloth_pack.packing.dataset.RowBuilder.build", never)
    assert told(documents(path, num_proc=3)) == first
    copied = write(tmp_path / "copy.jsonl", path.read_bytes())
    assert told(documents(copied)) == first
    pack_documents(documents(path), 128)


def test_files_of_the_cache_that_came_to_harm_are_made_again(large, tmp_path, cache):
    path = write(tmp_path / "a.jsonl", jsonl(ALPACA))
    large()
    first = told(documents(path))
    for file in cache.rglob("documents-*/*.arrow"):
        os.truncate(file, 100)
        break
    assert told(documents(path)) == first


# ---- processes


def kill(task):
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_a_process_that_is_killed_is_told_in_one_line():
    with pytest.raises(RunStopped, match=r"processes that prepare the data was killed.*--num_proc"):
        list(in_order(kill, range(8), 2))


SLOW = """
import sys, time, datasets
from pathlib import Path
from unsloth_pack.data.cache import from_cache, in_order
def slow(task):
    Path(sys.argv[1], str(task)).write_text(str(__import__("os").getpid()))
    time.sleep(60)
def make(folder):
    (folder / "half").write_text("half")
    return {"n": list(in_order(slow, range(4), 2))}
from_cache("documents", ["a key"], make)
"""


def test_a_killed_preparation_leaves_no_process_and_nothing_that_is_taken_for_whole(tmp_path, cache):
    (marks := tmp_path / "marks").mkdir()
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(marks)], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(pids := [path.read_text() for path in marks.iterdir()]) < 2 or not all(pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait(30)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    def make(folder):
        (folder / "0.arrow").write_text("whole")
        return {}

    folder, _ = from_cache("documents", ["a key"], make)
    assert sorted(path.name for path in folder.iterdir()) == ["0.arrow", "notes.json"]
    assert not list(folder.parent.glob("*.aside"))
