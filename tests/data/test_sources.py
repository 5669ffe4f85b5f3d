"""load_rows: every source of rows, and the error of each broken input."""

import gzip
import json

import datasets
import pytest
from tables import table

from unsloth_pack.data import load_rows
from unsloth_pack.demo import HELDOUT_FILE, TRAIN_FILE
from unsloth_pack.errors import InputError

ROWS = [
    {"instruction": "Add 1 and 1.", "input": "", "output": "2"},
    {"instruction": "Say it in French.", "input": 'yes, "sir"\nyes', "output": "oui,\u2028monsieur é😀"},
]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def error_of(dataset, split="train"):
    with pytest.raises(InputError) as caught:
        load_rows(str(dataset), split)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- what loads


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", jsonl(ROWS)),
        ("a.jsonl", jsonl(ROWS)),
        ("a.jsonl", "\n" + jsonl(ROWS).replace("\n", "\r\n\r\n")),
        ("a.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS).encode()),
        ("a.jsonl", json.dumps(ROWS)),
    ],
)
def test_json_variants_hold_the_same_rows(tmp_path, name, content):
    assert load_rows(write(tmp_path / name, content)).to_list() == ROWS


def test_folder_joins_files_in_name_order_and_keeps_splits_apart(tmp_path):
    write(tmp_path / "b.jsonl", jsonl([{"text": "b"}]))
    write(tmp_path / "a.json", json.dumps([{"text": "a"}]))
    write(tmp_path / "deep" / "my-test.jsonl", jsonl([{"text": "t"}]))
    write(tmp_path / "valid_1.jsonl", jsonl([{"text": "v"}]))
    write(tmp_path / "contest.jsonl", jsonl([{"text": "contest"}]))
    write(tmp_path / ".hidden" / "c.csv", "text\nhidden\n")
    write(tmp_path / "README.md", "about")
    assert load_rows(str(tmp_path))["text"][:] == ["a", "b", "contest"]
    assert load_rows(str(tmp_path), "test")["text"][:] == ["t"]
    assert load_rows(str(tmp_path), "validation")["text"][:] == ["v"]
    message = error_of(tmp_path, "dev")
    assert "no split 'dev'" in message
    assert "choose one of test, train, validation" in message


def test_saved_datasets(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(tmp_path / "two")
    assert load_rows(str(tmp_path / "one")).to_list() == ROWS
    assert load_rows(str(tmp_path / "two")).to_list() == ROWS
    assert load_rows(str(tmp_path / "two"), "test").to_list() == ROWS[:1]
    assert "no split 'dev'; choose one of test, train" in error_of(tmp_path / "two", "dev")
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    assert "not a complete saved dataset" in error_of(tmp_path / "one")


def test_the_demo_keeps_its_held_out_rows_apart():
    for split, file in (("train", TRAIN_FILE), ("test", HELDOUT_FILE)):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert load_rows("demo", split).to_list() == list(map(json.loads, lines))
    assert "demo: no split 'dev'; choose one of test, train" in error_of("demo", "dev")
    for name in ("demo-preferences", "demo-feedback"):
        train, test = (
            {turns[0]["content"] for turns in load_rows(name, s)["prompt"]} for s in ("train", "test")
        )
        assert train
        assert test
        assert not train & test


def test_hub_names_go_to_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("squad", "tatsu-lab/alpaca", "teknium/OpenHermes-2.5"):
        assert load_rows(name, "train[:1%]").to_list() == ROWS
    assert asked == [(n, "train[:1%]") for n in ("squad", "tatsu-lab/alpaca", "teknium/OpenHermes-2.5")]


# ---- what does not load, and its errors


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "Once. " * 999])
def test_missing_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = error_of(name)
    assert message.startswith(f"{name}: file not found; check the path")


def test_hub_failure(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\n(offline)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = error_of("tatsu-lab/alpaca")
    assert "tatsu-lab/alpaca: no such file or folder" in message
    assert "Couldn't reach the Hub (offline)" in message
    assert "check the name and the network" in message


NOT_JSON = '{"text": "a"}\n{"text": "b"\n{"text": "c"}\n'


@table(
    ("name", "content", "parts"),
    [
        ("a.csv", "instruction,output\n", ["0 rows"]),
        ("a.jsonl", NOT_JSON, ["a.jsonl line 2, column 13", "not valid JSON", "correct or remove it"]),
        ("a.jsonl", '{"text": NaN}\n', ["line 1", "NaN is no JSON number"]),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', ["line 2", "expected an object, got ['b']", "{...} a line"]),
        ("a.json", '["a", "b"]', ["expected a list of objects, got 'a'", "write [{...}, ...]"]),
        ("a.jsonl", '{"a": "ok"}\n{"a": "\\ud83d"}', ["'\\ud83d' in position 0: surrogates not allowed"]),
        ("a.csv", "a,b\n1,2\n\n1,2,3\n", ["a.csv line 4", "3 cells under 2 columns", "'3'", "quote cells"]),
        ("a.csv", "\na,a\n1,2\n", ["a.csv line 2", "a column is repeated in ['a', 'a']", "rename"]),
        ("a.csv", 'a,b\n1,"2\n3,4\n', ["a.csv line 3", "not valid CSV", "check its quotes"]),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', ["byte 0xe9 is not UTF-8", "save the file as UTF-8"]),
        ("a.txt", "a\nb\n".encode("utf-16-le"), ["a zero byte, as in UTF-16"]),
        ("a.parquet", b"", ["cannot be read", "a whole .parquet file"]),
        ("a.jsonl.zip", "PK", ["unknown suffix '.zip'", "may be compressed (.gz, .zst, .xz, .bz2)"]),
        (
            "a.jsonl.gz",
            gzip.compress(jsonl(ROWS).encode(), mtime=0)[:-4],
            ["cannot be read", "a whole .gz file"],
        ),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), ["cannot be read"]),
    ],
)
def test_broken_file(tmp_path, name, content, parts):
    message = error_of(write(tmp_path / name, content))
    for part in (name, *parts):
        assert part in message


def test_unreadable_folders(tmp_path):
    assert "no data files are found (" in error_of(tmp_path)
    write(tmp_path / "mixed" / "a.jsonl", jsonl(ROWS))
    write(tmp_path / "mixed" / "b.csv", "a,b\n1,2\n")
    assert "b.csv: in no split, beside files of train; " in error_of(tmp_path / "mixed")
    write(tmp_path / "columns" / "a.jsonl", jsonl(ROWS))
    write(tmp_path / "columns" / "b.jsonl", jsonl([{"text": "b"}]))
    message = error_of(tmp_path / "columns")
    assert "b.jsonl: columns text where a.jsonl has instruction, input, output; keep files" in message
    write(tmp_path / "empty" / "a.jsonl", jsonl(ROWS))
    write(tmp_path / "empty" / "b.json", "[]")
    assert "b.json: 0 rows" in error_of(tmp_path / "empty")


def test_a_folder_of_compressed_files(tmp_path):
    for number, row in enumerate(ROWS):
        write(tmp_path / f"s{number}.jsonl.gz", gzip.compress(jsonl([row]).encode()))
    write(tmp_path / "test.jsonl.gz", gzip.compress(jsonl(ROWS[:1]).encode()))
    assert list(load_rows(str(tmp_path))) == ROWS
    assert list(load_rows(str(tmp_path), "test")) == ROWS[:1]
    write(tmp_path / "s2.jsonl.zip", b"PK")
    assert "s2.jsonl.zip: unknown suffix '.zip'" in error_of(tmp_path)
