"""Packs on disk: the rows of pack_dataset, and refused when anything about them is not as it was written."""

import datasets
import numpy as np
import pyarrow as pa
import pytest
from packs_on_disk import CAPACITY, cut, documents, edit_manifest, flip_a_byte, rewrite, write
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.packing import find_packs, pack_dataset, read_manifest, read_packs


def read(folder):
    return read_packs(folder, "a" * 64)


@pytest.fixture
def packs(tmp_path):
    write(tmp_path / "packs", documents(300), rows_per_shard=50)
    return tmp_path / "packs"


@pytest.mark.parametrize(("strategy", "rows_per_shard"), [("bfd", 7), ("bfd", None), ("next_fit", 7)])
def test_the_rows_are_those_of_pack_dataset(strategy, rows_per_shard, tmp_path):
    rows = documents(300)
    made = write(tmp_path / "packs", rows, strategy=strategy, rows_per_shard=rows_per_shard)
    manifest, packed = read(tmp_path / "packs")
    assert packed.to_list() == pack_dataset(datasets.Dataset.from_list(rows), CAPACITY, strategy).to_list()
    assert manifest == made == read_manifest(tmp_path / "packs")
    assert manifest.rows == len(packed)
    assert manifest.documents == len(rows)
    assert manifest.tokens == manifest.ledger.tokens_read == sum(map(len, packed["input_ids"]))
    assert {shard.rows for shard in manifest.shards[:-1]} <= {rows_per_shard}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packs"]


def test_what_a_shard_holds(packs):
    with pa.ipc.open_stream(packs / "shard-00001.arrow") as stream:
        rows = stream.read_all().to_pylist()
    expected = read(packs)[1].select(range(50, 100)).to_list()
    for row, other in zip(rows, expected, strict=True):
        assert row["cu_lengths"] == [0, *np.cumsum(other["seq_lengths"])]
        assert row["max_length"] == max(other["seq_lengths"])
        assert (row["input_ids"], row["labels"]) == (other["input_ids"], other["labels"])


def test_rows_stay_on_disk(packs):
    packed = read(packs)[1]
    assert {file["filename"] for file in packed.cache_files} == {str(path) for path in packs.glob("*.arrow")}
    before = pa.total_allocated_bytes()
    again = read(packs)[1]
    assert pa.total_allocated_bytes() - before < 8 * again.num_rows + 4 * 300 + 4096  # bounds, not tokens


def test_the_fingerprint_is_of_the_rows_alone(tmp_path):
    rows = documents(300)

    def fingerprint(name, rows=rows, **options):
        return write(tmp_path / name, rows, **options).data_fingerprint

    same = {fingerprint("a"), fingerprint("b", rows_per_shard=3), fingerprint("c", tokenizer_hash="b" * 64)}
    assert len(same) == 1
    longest = max(range(300), key=lambda i: len(rows[i]["input_ids"]))
    other = [dict(row) for row in rows]
    other[longest]["labels"] = [-100] * len(other[longest]["labels"])
    one, two = (
        [{"input_ids": ids, "labels": ids} for ids in split] for split in ([[1, 2], [3]], [[1], [2, 3]])
    )
    names = {"d": other, "e": one, "f": two}
    different = {fingerprint(name, rows, strategy="next_fit") for name, rows in names.items()}
    assert len(different | same) == 4


def test_only_an_empty_folder_is_written_to(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", documents(10))
    for name in ("empty", "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="not an empty folder"):
            write(tmp_path / name, documents(10))


@table(
    ("options", "row", "message"),
    [
        ({"capacity": 8}, None, "capacity is 8"),
        (
            {},
            {"input_ids": [5, 6, 7], "labels": [6, 7, -100]},
            "row 50: token 5 with label 6; .* not shifted",
        ),
        ({}, {"input_ids": [5, 2**40], "labels": [-100] * 2}, "row 50: token 1099511627776"),
        ({}, {"input_ids": [5, -6], "labels": [-100] * 2}, "row 50: token -6"),
    ],
)
def test_what_could_not_be_read_is_not_written(options, row, message, tmp_path):
    with pytest.raises(InputError, match=message):
        write(tmp_path / "new" / "packs", documents(50) + ([row] if row else []), **options)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer(packs):
    with pytest.raises(InputError, match=r"packed with another tokenizer.*aaaaaaaaaaaa.*bbbbbbbbbbbb"):
        read_packs(packs, "b" * 64)


@table(
    ("damage", "message"),
    [
        (lambda packs: cut(packs / "shard-00001.arrow"), "shard-00001.arrow: its checksum differs"),
        (lambda packs: flip_a_byte(packs / "shard-00002.arrow"), "shard-00002.arrow: its checksum differs"),
        (lambda packs: (packs / "shard-00001.arrow").unlink(), "shard-00001.arrow: cannot be read"),
        (lambda packs: (packs / "packs.json").unlink(), "packs.json: not a whole manifest"),
        (lambda packs: cut(packs / "packs.json"), "packs.json: not a whole manifest"),
        (
            lambda packs: edit_manifest(packs, version=2),
            r"it is of \('unsloth_pack packs', 2\), this release",
        ),
        (lambda packs: edit_manifest(packs, ledger={}), "not a whole manifest"),
        (lambda packs: edit_manifest(packs, shards=[]), "where the manifest has"),
    ],
)
def test_damage(damage, message, packs):
    damage(packs)
    assert find_packs(str(packs)) == packs
    with pytest.raises(InputError, match=message) as refused:
        read(packs)
    assert "\n" not in str(refused.value)
    assert ";" in str(refused.value)


def setting(name, value):
    def change(rows):
        rows[3][name] = value(rows[3]) if callable(value) else value

    return change


LOST = "cu_lengths"


def wrapping_around(rows):
    """In 32 bits all steps are positive and sum to the row."""
    rows[3] |= {"cu_lengths": [0, 2**31 - 1, -2, len(rows[3]["input_ids"])], "max_length": 2**31 - 1}


@table(
    "change",
    [
        setting(LOST, [0]),
        setting(LOST, lambda row: [*row[LOST][:-1], row[LOST][-1] - 1]),
        setting(LOST, lambda row: [0, *row[LOST]]),
        wrapping_around,
        setting("labels", lambda row: row["labels"][1:]),
    ],
)
def test_boundaries_that_contradict_the_rows(change, packs):
    """With a checksum that says all is well."""
    rewrite(packs, change)
    with pytest.raises(InputError, match=r"row 3: \d+ tokens, \d+ labels and the cu_lengths \[") as refused:
        read(packs)
    assert "\n" not in str(refused.value)
