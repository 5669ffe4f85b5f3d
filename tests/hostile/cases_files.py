"""Data files: every format in every kind of damage."""

import csv
import gzip
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from refusals import FEW, Case, train

ROWS = [{"instruction": f"Say café {i} — now", "output": f"café, {i}\n“done”"} for i in range(4)]


def as_json(rows: list[Any]) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def as_jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: list[Any]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def as_parquet(rows: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), file)
    return file.getvalue()


def as_txt(rows: list[Any]) -> bytes:
    return "\n\n".join(row["output"] for row in rows).encode()


WHOLE = {
    "json": as_json(ROWS),
    "jsonl": as_jsonl(ROWS),
    "csv": as_csv(ROWS),
    "parquet": as_parquet(ROWS),
    "txt": as_txt(ROWS),
}
TEXTS = ("json", "jsonl", "csv", "txt")


def case(name: str, file: str, content: bytes | str, says: str, **flags: object) -> Case:
    data = content.encode() if isinstance(content, str) else content
    return Case(name, says, train(dataset=file, **flags), lambda folder: (folder / file).write_bytes(data))


def placed(name: str, dataset: str, prepare: Callable[[Path], object], says: str) -> Case:
    return Case(name, says, train(dataset=dataset), prepare)


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rows.json", data)
    return file.getvalue()


def recoded(suffix: str) -> dict[str, tuple[bytes, str]]:
    """A text file in other encodings, and what is said of each."""
    whole = WHOLE[suffix]
    text = whole.decode()
    return {
        "blank": (b" \n\t\n  \r\n", "0 rows; give|no columns|no known data format"),
        "UTF-16": (text.encode("utf-16"), "byte 0xff is not UTF-8; save the file as UTF-8"),
        "Windows-1252": (text.encode("cp1252"), "is not UTF-8; save"),
        "compressed": (gzip.compress(whole, mtime=0), "byte 0x8b is not UTF-8"),
    }


ENCODINGS = [
    case(f"{suffix}: {name}", f"rows.{suffix}", data, says)
    for suffix in TEXTS
    for name, (data, says) in recoded(suffix).items()
]

CUT = [
    case(f"{suffix} cut", f"rows.{suffix}", WHOLE[suffix][: 3 * len(WHOLE[suffix]) // 5], says)
    for suffix, says in (
        ("json", "line \\d+.*not valid JSON|not UTF-8"),
        ("jsonl", "line \\d+.*not valid JSON|not UTF-8"),
        ("parquet", "cannot be read .*a whole .parquet file"),
    )
]

JSON = [
    case("json: a key twice", "rows.json", '[{"text": "a", "text": "b"}]', "key 'text' appears twice"),
    case("json: html", "rows.json", "<!DOCTYPE html><html>404</html>", "not valid JSON"),
    case("jsonl: printed over lines", "rows.jsonl", '{\n "text": "a"\n}\n', "line 1.*not valid JSON"),
]

CSV = [
    case("csv: semicolons", "rows.csv", "instruction;output\na;b\n", "columns instruction;output"),
]


def table(**columns: Any) -> bytes:
    return as_parquet(pa.table(columns))


PARQUET = [
    case("parquet: a null", "rows.parquet", table(text=["a", None]), "row 1, column 'text'.*got None"),
    case(
        "parquet: maps",
        "rows.parquet",
        table(text=pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))),
        "cannot be read",
    ),
    case(
        "parquet: a column twice",
        "rows.parquet",
        as_parquet(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])),
        "a column is repeated",
    ),
]


def several(**files: bytes | str) -> Callable[[Path], None]:
    """A folder `rows` of these files; `__` stands for a dot."""

    def prepare(folder: Path) -> None:
        (folder / "rows").mkdir()
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (folder / "rows" / name.replace("__", ".")).write_bytes(data)

    return prepare


def saved_without_data(folder: Path) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "rows"))
    next((folder / "rows").glob("*.arrow")).unlink()


FOLDERS = [
    placed(
        "parquet of two types",
        "rows",
        several(a__parquet=table(text=["a"]), b__parquet=table(text=[["a"]])),
        "cannot be read .*incompatible types",
    ),
    placed("saved, without its data", "rows", saved_without_data, "not a complete saved dataset"),
    placed("packs, manifest cut", "rows", several(packs__json='{"format"'), "not a whole manifest"),
]

PATHS = [
    placed(
        "a dangling link", "rows.json", lambda f: (f / "rows.json").symlink_to("gone.json"), "file not found"
    ),
    placed(
        "compressed rows beside others",
        "data",
        lambda f: [
            (f / "data").mkdir(),
            (f / "data" / "a.jsonl").write_text(FEW),
            (f / "data" / "b.jsonl.zip").write_bytes(zipped(FEW.encode())),
        ],
        "b.jsonl.zip: unknown suffix '.zip'",
    ),
    placed("a pipe", "rows.json", lambda f: os.mkfifo(f / "rows.json"), "not an ordinary file"),
    case("a .zst file of something else", "rows.jsonl.zst", b"x", "cannot be read .*a whole .zst file"),
]

CASES = [*ENCODINGS, *CUT, *JSON, *CSV, *PARQUET, *FOLDERS, *PATHS]
