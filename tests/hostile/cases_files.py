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
    text = WHOLE[suffix].decode()
    latin = text.replace("—", "-").replace("“", '"').replace("”", '"').encode("latin-1")
    whole = WHOLE[suffix]
    accent = whole.index("é".encode())
    return {
        "empty": (b"", "the file is empty; give one with"),
        "blank": (b" \n\t\n  \r\n", "the file is empty"),
        "only a byte order mark": (b"\xef\xbb\xbf", "the file is empty"),
        "UTF-16": (text.encode("utf-16"), "byte 0xff at offset 0 is not UTF-8; save the file as UTF-8"),
        "UTF-16, big end first": (
            b"\xfe\xff" + text.encode("utf-16-be"),
            "byte 0xfe at offset 0 is not UTF-8",
        ),
        "UTF-16 without a mark": (text.replace("—", "-").encode("utf-16-le"), "; save the file as UTF-8"),
        "UTF-32": (text.encode("utf-32"), "; save the file as UTF-8"),
        "Latin-1": (latin, "byte 0xe9 .* is not UTF-8; save the file as UTF-8"),
        "Windows-1252": (text.encode("cp1252"), "is not UTF-8; save"),
        "Shift-JIS": (whole + "日本".encode("shift-jis"), "is not UTF-8; save"),
        "a character cut in half": (whole[: accent + 1], "is not UTF-8; save"),
        "an overlong character": (whole[:accent] + b"\xc0\xaf" + whole[accent:], "byte 0xc0"),
        "a surrogate in UTF-8": (whole[:accent] + b"\xed\xa0\x80" + whole[accent:], "byte 0xed"),
        "compressed": (gzip.compress(whole, mtime=0), "byte 0x8b at offset 1 is not UTF-8"),
        "a zip archive": (zipped(whole), "is not UTF-8|zero byte"),
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "byte 0x89 at offset 0"),
        "a parquet file": (WHOLE["parquet"], "zero byte|is not UTF-8"),
        "a zero byte": (
            whole[:accent] + b"\x00" + whole[accent + 2 :],
            "zero byte.*; save the file as UTF-8",
        ),
    }


ENCODINGS = [
    case(f"{suffix}: {name}", f"rows.{suffix}", data, says)
    for suffix in TEXTS
    for name, (data, says) in recoded(suffix).items()
]

CUT = [
    case(f"{suffix} cut at {share:.0%}", f"rows.{suffix}", cut(WHOLE[suffix], share), says)
    for suffix, says in (
        ("json", "line \\d+.*not valid JSON|not UTF-8"),
        ("jsonl", "line \\d+.*not valid JSON|not UTF-8"),
        ("parquet", "not a complete parquet file"),
    )
    for share in (0.1, 0.3, 0.6, 0.7, 0.9, 0.99)
    for cut in [lambda data, share: data[: int(len(data) * share)]]
]

JSON = [
    case("json: a number", "rows.json", "5", "expected a list of objects, got 5"),
    case("json: a string", "rows.json", '"text"', "expected a list of objects, got 'text'"),
    case("json: null", "rows.json", "null", "expected a list of objects, got None"),
    case("json: a list of numbers", "rows.json", "[1, 2]", "got 1 as item 0"),
    case("json: a list of lists", "rows.json", '[[{"text": "a"}]]', "as item 0"),
    case("json: a null row", "rows.json", '[{"text": "a"}, null]', "got None as item 1"),
    case("json: no rows", "rows.json", "[]", "0 rows; give"),
    case("json: an empty object", "rows.json", "{}", "0 of the keys"),
    case("json: rows without columns", "rows.json", "[{}, {}]", "no columns"),
    case("json: two lists", "rows.json", '{"a": [{"text": "x"}], "b": [{"text": "y"}]}', "2 of the keys"),
    case("json: a list of no rows", "rows.json", '{"data": []}', "0 of the keys"),
    case("json: of columns", "rows.json", '{"text": ["a", "b"]}', "expected a string, got \\['a', 'b'\\]"),
    case("json: a trailing comma", "rows.json", '[{"text": "a"},]', "not valid JSON"),
    case("json: a comment", "rows.json", '[{"text": "a"}] // mine', "not valid JSON"),
    case("json: single quotes", "rows.json", "[{'text': 'a'}]", "not valid JSON"),
    case("json: bare keys", "rows.json", "[{text: 1}]", "not valid JSON"),
    case("json: undefined", "rows.json", '[{"text": undefined}]', "not valid JSON"),
    case("json: NaN", "rows.json", '[{"text": "a", "score": NaN}]', "NaN is no JSON number"),
    case("json: infinity", "rows.json", '[{"text": "a", "score": -Infinity}]', "-Infinity is no JSON number"),
    case("json: 1e400", "rows.json", '[{"text": 1e400}]', "expected a string, got inf"),
    case("json: 5,000 digits", "rows.json", '[{"text": ' + "9" * 5000 + "}]", "not valid JSON"),
    case("json: 100,000 brackets", "rows.json", "[" * 100_000, "not valid JSON"),
    case(
        "json: deep in a field beside the text",
        "rows.json",
        '[{"text": "a", "x": ' + "[" * 60 + "]" * 60 + "}]",
        "nested too deeply",
    ),
    case(
        "json: deep in a field", "rows.json", '[{"text": ' + "[" * 5000 + "]" * 5000 + "}]", "recursion depth"
    ),
    case("json: a key twice", "rows.json", '[{"text": "a", "text": "b"}]', "key 'text' appears twice"),
    case(
        "json: an inner key twice", "rows.json", '[{"messages": [{"role": "user", "role": "x"}]}]', "'role'"
    ),
    case("json: an odd escape", "rows.json", r'[{"text": "\x41"}]', "Invalid \\\\escape"),
    case("json: a line break in a string", "rows.json", '[{"text": "a\nb"}]', "Invalid control character"),
    case("json: half a surrogate pair", "rows.json", r'[{"text": "a\ud83d"}]', "half of a surrogate pair"),
    case("json: half a pair as a key", "rows.json", r'[{"text": "a", "\ud83d": 1}]', "half of a surrogate"),
    case("json: two documents", "rows.json", '[{"text": "a"}]\n[{"text": "b"}]', "Extra data"),
    case("json: text behind", "rows.json", '[{"text": "a"}] and so on', "Extra data"),
    case("json: 10 MB cut", "rows.json", '[{"text": "' + "x" * 10_000_000, "Unterminated string"),
    case("json: html", "rows.json", "<!DOCTYPE html><html>404</html>", "not valid JSON"),
    case(
        "json: a pointer of Git LFS", "rows.json", "version https://git-lfs.github.com/spec/v1\n", "not valid"
    ),
    case("jsonl: a number a line", "rows.jsonl", "1\n2\n", "line 1: expected an object, got 1"),
    case("jsonl: a list a line", "rows.jsonl", '{"text": "a"}\n["b"]\n', "line 2: expected an object"),
    case("jsonl: null", "rows.jsonl", '{"text": "a"}\nnull\n', "line 2: expected an object, got None"),
    case("jsonl: two on a line", "rows.jsonl", '{"text": "a"} {"text": "b"}\n', "line 1.*Extra data"),
    case("jsonl: printed over lines", "rows.jsonl", '{\n "text": "a"\n}\n', "line 1.*not valid JSON"),
    case("jsonl: commas at the ends", "rows.jsonl", '{"text": "a"},\n{"text": "b"},\n', "line 1.*Extra data"),
    case("jsonl: old line ends", "rows.jsonl", '{"text": "a"}\r{"text": "b"}\r', "line 1.*Extra data"),
    case("jsonl: NaN", "rows.jsonl", '{"text": "a"}\n{"text": NaN}\n', "line 2.*NaN"),
    case("jsonl: a key twice", "rows.jsonl", '{"text": "a"}\n{"text": "a", "text": "a"}\n', "line 2.*'text'"),
    case("jsonl: python", "rows.jsonl", "{'text': None}\n", "line 1.*not valid JSON"),
    case("jsonl: 10 MB of one line, cut", "rows.jsonl", '{"text": "' + "x" * 10_000_000, "line 1.*Untermin"),
    case(
        "jsonl: 10 MB in a wrong field",
        "rows.jsonl",
        '{"x": "' + "y" * 10_000_000 + '"}',
        "no known data for",
    ),
    case("jsonl: empty objects", "rows.jsonl", "{}\n{}\n", "no columns"),
]

CSV = [
    case("csv: only a header", "rows.csv", "text\n", "0 rows"),
    case("csv: too few cells", "rows.csv", "instruction,output\na\n", "line 2: 1 cells under 2 columns"),
    case("csv: too many cells", "rows.csv", "instruction,output\na,b\na,b,c\n", "line 3: 3 cells under 2"),
    case("csv: an open quote", "rows.csv", 'text\n"a\nb\n', "not valid CSV .*; check its quotes"),
    case("csv: text behind a quote", "rows.csv", 'text\n"a"b\n', "line 2: not valid CSV"),
    case("csv: a column twice", "rows.csv", "text,text\na,b\n", "a column is repeated"),
    case("csv: semicolons", "rows.csv", "instruction;output\na;b\n", "columns instruction;output"),
    case("csv: tabs", "rows.csv", "instruction\toutput\na\tb\n", "no known data format"),
    case("csv: without a header", "rows.csv", "what is 1,2\nwhat is 2,3\n", "no known data format"),
    case("csv: a blank name", "rows.csv", ",output\na,b\n", "no known data format"),
    case("csv: blank cells", "rows.csv", "instruction,output\na,\n", "row 0, column 'output': expected some"),
    case("csv: a quoted blank line", "rows.csv", '""\n""\n', "no known data format|0 rows"),
    case("csv: 10 MB of one cell, cut", "rows.csv", 'text\n"' + "x" * 10_000_000, "not valid CSV"),
]


def table(**columns: Any) -> bytes:
    return as_parquet(pa.table(columns))


def not_unicode() -> bytes:
    text = pa.array([b"\xff\xfe", b"ok"], pa.binary()).view(pa.string())
    return as_parquet(pa.table({"text": text}))


PARQUET = [
    case("parquet: empty", "rows.parquet", b"", "not a complete parquet file .*; download or write it again"),
    case("parquet: only its magic", "rows.parquet", b"PAR1", "not a complete parquet file"),
    case("parquet: magic twice", "rows.parquet", b"PAR1PAR1", "not a complete parquet file"),
    case("parquet: another magic", "rows.parquet", WHOLE["parquet"][:-4] + b"PAR2", "not a complete"),
    case("parquet: encrypted", "rows.parquet", WHOLE["parquet"][:-4] + b"PARE", "not a complete"),
    case(
        "parquet: a long footer",
        "rows.parquet",
        WHOLE["parquet"][:-8] + b"\xff\xff\xff\x7fPAR1",
        "not a compl",
    ),
    case(
        "parquet: a short footer", "rows.parquet", WHOLE["parquet"][:-8] + b"\1\0\0\0PAR1", "not a complete"
    ),
    case("parquet: json", "rows.parquet", WHOLE["json"], "not a complete parquet file"),
    case("parquet: zeros in front", "rows.parquet", bytes(200) + WHOLE["parquet"][200:], "not a complete"),
    case("parquet: no rows", "rows.parquet", table(text=pa.array([], pa.string())), "0 rows"),
    case("parquet: no columns", "rows.parquet", as_parquet(pa.table({})), "0 rows|no columns"),
    case("parquet: numbers", "rows.parquet", table(text=[1, 2]), "row 0, column 'text': expected a string"),
    case("parquet: nulls", "rows.parquet", table(text=pa.nulls(3)), "expected a string, got None"),
    case("parquet: a null", "rows.parquet", table(text=["a", None]), "row 1, column 'text'.*got None"),
    case("parquet: bytes", "rows.parquet", table(text=[b"a"]), "expected a string, got b'a'"),
    case("parquet: dates", "rows.parquet", table(text=pa.array([1], pa.date32())), "expected a string, got"),
    case(
        "parquet: decimals",
        "rows.parquet",
        table(text=pa.array(["1.5"]).cast(pa.decimal128(5, 2))),
        "a string",
    ),
    case("parquet: lists", "rows.parquet", table(text=[["a"]]), "expected a string, got \\['a'\\]"),
    case("parquet: objects", "rows.parquet", table(text=[{"a": 1}]), "expected a string, got {'a': 1}"),
    case(
        "parquet: maps",
        "rows.parquet",
        table(text=pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))),
        "cannot be used",
    ),
    case(
        "parquet: durations",
        "rows.parquet",
        table(text=pa.array([1], pa.duration("s"))),
        "got datetime.timedelta",
    ),
    case("parquet: not Unicode", "rows.parquet", not_unicode(), "Invalid UTF8 sequence at string index 0"),
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


def saved(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """A folder `rows` that `datasets` saved, damaged."""

    def prepare(folder: Path) -> None:
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "rows"))
        damage(folder / "rows")

    return prepare


def cut(pattern: str, share: float = 0.5) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = next(folder.glob(pattern))
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return damage


def removed(pattern: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(pattern)).unlink()


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


FOLDERS = [
    placed("a folder named as a file", "rows.json", lambda f: (f / "rows.json").mkdir(), "no .json, .jsonl"),
    placed("the home of nobody", "~nobody-at-all/rows.json", several(), "file not found; check the path"),
    placed("an empty folder", "rows", several(), "no .json, .jsonl.* file in this folder"),
    placed("only hidden files", "rows", several(__rows__json=WHOLE["json"]), "file in this folder"),
    placed("only other files", "rows", several(a__md="# text"), "file in this folder"),
    placed("two formats", "rows", several(a__json=WHOLE["json"], b__csv=WHOLE["csv"]), "several formats"),
    placed(
        "two kinds of columns",
        "rows",
        several(a__json=WHOLE["json"], b__json='[{"text": "a"}]'),
        "b.json: columns text where a.json has instruction, output",
    ),
    placed(
        "a broken file among whole", "rows", several(a__json=WHOLE["json"], b__json="[{"), "b.json line 1"
    ),
    placed(
        "an empty file among whole", "rows", several(a__json=WHOLE["json"], b__json=""), "b.json: the file"
    ),
    placed("no rows in one of them", "rows", several(a__json=WHOLE["json"], b__json="[]"), "b.json: 0 rows"),
    placed(
        "only test data", "rows", several(test__json=WHOLE["json"]), "no split 'train'; choose one of test"
    ),
    placed(
        "parquet and a cut one", "rows", several(a__parquet=WHOLE["parquet"], b__parquet=b"PAR1"), "b.parquet"
    ),
    placed(
        "parquet of two types",
        "rows",
        several(a__parquet=table(text=["a"]), b__parquet=table(text=[["a"]])),
        "column types that cannot be used",
    ),
    placed("a saved data set cut", "rows", saved(cut("*.arrow")), "not a complete saved dataset"),
    placed("saved, without its data", "rows", saved(removed("*.arrow")), "not a complete saved dataset"),
    placed("saved, state cut", "rows", saved(cut("state.json")), "not a complete saved dataset"),
    placed(
        "saved, state of nothing", "rows", saved(written("state.json", "{}")), "not a complete saved dataset"
    ),
    placed("saved, state a list", "rows", saved(written("state.json", "[]")), "not a complete saved dataset"),
    placed(
        "saved, info missing", "rows", saved(removed("dataset_info.json")), "not a complete saved dataset"
    ),
    placed("saved, info cut", "rows", saved(cut("dataset_info.json")), "not a complete saved dataset"),
    placed(
        "saved, columns of no type",
        "rows",
        saved(written("dataset_info.json", '{"features": {"a": {"_type": "Frob"}}}')),
        "not a complete saved dataset",
    ),
    placed(
        "a dictionary of nothing", "rows", several(dataset_dict__json="{}"), "not a complete saved dataset"
    ),
    placed("a dictionary, cut", "rows", several(dataset_dict__json='{"spl'), "not a complete saved dataset"),
    placed(
        "a dictionary without its split",
        "rows",
        several(dataset_dict__json='{"splits": ["train"]}'),
        "not a complete saved dataset",
    ),
    placed(
        "packs without a manifest",
        "rows",
        several(**{"shard-00000__arrow": b"x"}),
        "without their packs.json",
    ),
    placed("packs, manifest cut", "rows", several(packs__json='{"format"'), "not a whole manifest"),
    placed(
        "packs, manifest of others", "rows", several(packs__json='{"format": "x"}'), "not a manifest of packs"
    ),
    placed(
        "packs, manifest a folder", "rows", lambda f: (f / "rows/packs.json").mkdir(parents=True), "be read"
    ),
]

PATHS = [
    placed("a missing file", "rows.json", lambda f: None, "file not found; check the path"),
    placed("a missing folder", "data/rows/", lambda f: None, "file not found"),
    placed(
        "a dangling link", "rows.json", lambda f: (f / "rows.json").symlink_to("gone.json"), "file not found"
    ),
    placed(
        "a link to itself", "rows.json", lambda f: (f / "rows.json").symlink_to("rows.json"), "file not found"
    ),
    placed(
        "a link to a device",
        "rows.json",
        lambda f: (f / "rows.json").symlink_to("/dev/zero"),
        "not an ordinary file",
    ),
    placed(
        "compressed rows beside others",
        "data",
        lambda f: [
            (f / "data").mkdir(),
            (f / "data" / "a.jsonl").write_text(FEW),
            (f / "data" / "b.jsonl.zip").write_bytes(zipped(FEW.encode())),
        ],
        "b.jsonl.zip: files in .zip are not read",
    ),
    placed("a pipe", "rows.json", lambda f: os.mkfifo(f / "rows.json"), "not an ordinary file"),
    placed("no name", " ", lambda f: None, "dataset is ' '; give a file"),
    placed("a name too long", "x" * 5000 + ".json", lambda f: None, "file not found|File name too long"),
    placed("a name with a zero", "a\0b.json", lambda f: None, "file not found"),
    placed("a name with a line break", "a\nb.json", lambda f: None, "file not found"),
    placed("an address", "https://example.org/rows.json", lambda f: None, "file not found"),
    placed("no suffix", "rows", lambda f: (f / "rows").write_text("[]"), "unknown suffix ''"),
    *(
        placed(
            f"a {suffix} file",
            f"rows{suffix}",
            lambda f, s=suffix: (f / f"rows{s}").write_bytes(b"x"),
            "unknown suffix",
        )
        for suffix in (".tsv", ".pkl", ".zip", ".arrow", ".xlsx", ".py")
    ),
    *(
        placed(
            f"a {suffix} file of something else",
            f"rows{suffix}",
            lambda f, s=suffix: (f / f"rows{s}").write_bytes(b"x"),
            "not a whole",
        )
        for suffix in (".json.gz", ".jsonl.zst")
    ),
]

CASES = [*ENCODINGS, *CUT, *JSON, *CSV, *PARQUET, *FOLDERS, *PATHS]
