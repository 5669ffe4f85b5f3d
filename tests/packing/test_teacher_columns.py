"""A teacher's columns in packs: as the teacher said, and refused when they cannot be of their rows."""

import numpy as np
import pyarrow as pa
import pytest
from packs_on_disk import edit_manifest, rewrite
from tables import table
from test_offline import documents, quiet, read_packs, write  # noqa: F401

from unsloth_pack.errors import InputError
from unsloth_pack.packing import dataset, read_manifest
from unsloth_pack.packing.teacher_columns import PackedTeacher

K, V = 3, 2000


class Arithmetic:
    """A teacher whose answers name the token, its label and its document."""

    packed = PackedTeacher("arithmetic", K, 1.0)

    def __call__(self, ids, labels, lengths):
        document = np.repeat(np.arange(len(lengths)), lengths)
        log_probs = -np.stack([labels, document, np.ones_like(ids)], axis=1)
        return np.stack([ids, ids + 1, ids + 2], axis=1).astype(np.int32), log_probs.astype(np.float16)


@pytest.fixture
def packs(tmp_path):
    write(tmp_path / "packs", documents(300), rows_per_shard=50, teacher=Arithmetic())
    return tmp_path / "packs"


def read(folder, outputs=V):
    return read_packs(folder, "a" * 64, teach_outputs=outputs)


@pytest.mark.parametrize("bytes_a_batch", [1, 20_000])
def test_rows_hold_what_the_teacher_said_of_them(bytes_a_batch, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_BYTES_A_BATCH", bytes_a_batch)
    made = write(tmp_path / "packs", documents(300), rows_per_shard=50, teacher=Arithmetic())
    plain = write(tmp_path / "plain", documents(300))
    manifest, rows = read(tmp_path / "packs")
    assert manifest == made == read_manifest(tmp_path / "packs")
    assert manifest.teacher == Arithmetic.packed
    assert plain.teacher is None
    assert plain.data_fingerprint != made.data_fingerprint
    without = read_packs(tmp_path / "packs", "a" * 64)[1]
    assert without.to_list() == read_packs(tmp_path / "plain", "a" * 64)[1].to_list()
    for row, other in zip(rows, without, strict=True):
        ids, log_probs = Arithmetic()(*(np.array(column) for column in other.values()))
        assert row["teacher_ids"].tolist() == ids.ravel().tolist()
        assert row["teacher_log_probs"].tolist() == log_probs.ravel().tolist()
        assert {name: row[name] for name in other} == other  # lists, as ever


def test_a_batch_counts_the_teachers_bytes(tmp_path, monkeypatch):
    """So that few rows of many tokens of a teacher are in memory."""
    monkeypatch.setattr(dataset, "_BYTES_A_BATCH", 4 * 64 * (6 * K + 16))
    write(tmp_path / "packs", documents(300), teacher=Arithmetic())
    with pa.ipc.open_stream(tmp_path / "packs" / "shard-00000.arrow") as stream:
        assert max(map(len, stream)) in (4, 5)


def test_six_bytes_for_each(tmp_path):
    sizes = {}
    for name, teacher in (("plain", None), ("taught", Arithmetic())):
        manifest = write(tmp_path / name, documents(3000), teacher=teacher)
        sizes[name] = sum(shard.bytes for shard in manifest.shards) / manifest.tokens
    assert sizes["taught"] - sizes["plain"] == pytest.approx(6 * K, abs=2)  # and offsets


def test_a_teacher_that_fails_leaves_nothing(tmp_path):
    class Failing(Arithmetic):
        def __call__(self, ids, labels, lengths):
            raise InputError("no numbers")

    with pytest.raises(InputError, match="no numbers"):
        write(tmp_path / "packs", documents(50), teacher=Failing())
    assert list(tmp_path.iterdir()) == []


def test_packs_without_a_teacher(tmp_path):
    write(tmp_path / "packs", documents(10))
    with pytest.raises(InputError, match=r"packs: packed without a teacher; write .* `unsloth-pack teach`"):
        read(tmp_path / "packs")


def change(name, value):
    return lambda rows: rows[3].update({name: value(rows[3][name])})


@table(
    ("damage", "message"),
    [
        (change("teacher_ids", lambda ids: ids[:-1]), "row 3: not 3 tokens of the teacher for each"),
        (change("teacher_log_probs", lambda values: values[3:]), "row 3: not 3 tokens of the teacher"),
        (change("teacher_ids", lambda ids: [-1, *ids[1:]]), "row 3: not 3 tokens of the teacher"),
        (
            change("teacher_ids", lambda ids: [*ids[:-1], V]),
            "row 3: the teacher has token 2000, .* 0 to 1999",
        ),
    ],
)
def test_columns_that_are_not_of_the_rows(damage, message, packs):
    with pa.ipc.open_stream(packs / "shard-00000.arrow") as stream:
        rewrite(packs, damage, stream.schema)
    with pytest.raises(InputError, match=message) as refused:
        read(packs)
    assert "\n" not in str(refused.value)


def test_a_manifest_of_another_teacher(packs):
    edit_manifest(packs, teacher={"model_name": "other", "top_k": K + 1, "temperature": 1.0})
    with pytest.raises(InputError, match="row 0: not 4 tokens of the teacher for each"):
        read(packs)
    edit_manifest(packs, teacher=None)
    with pytest.raises(InputError, match="its columns are not those of packs"):
        read_packs(packs, "a" * 64)
    edit_manifest(packs, teacher={"model_name": "other"})
    with pytest.raises(InputError, match="not a whole manifest"):
        read(packs)
