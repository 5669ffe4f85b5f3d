"""A teacher's columns in packs: as the teacher said."""

import numpy as np
import pytest
from packs_on_disk import documents, edit_manifest, write

from unsloth_pack.errors import InputError
from unsloth_pack.packing import read_manifest, read_packs
from unsloth_pack.packing.model_columns import TEACHER_COLUMNS, PackedTeacher

K = 3


class Arithmetic:
    """A teacher whose answers name the token, its label and its document."""

    packed = PackedTeacher("arithmetic", K, 1.0)

    def __call__(self, row):
        ids, labels, lengths = (row[name] for name in ("input_ids", "labels", "seq_lengths"))
        document = np.repeat(np.arange(len(lengths)), lengths)
        log_probs = -np.stack([labels, document, np.ones_like(ids)], axis=1)
        ids = np.stack([ids, ids + 1, ids + 2], axis=1).astype(np.int32)
        return {"teacher_ids": ids, "teacher_log_probs": log_probs.astype(np.float16)}


@pytest.fixture
def packs(tmp_path):
    write(tmp_path / "packs", documents(300), rows_per_shard=50, model=Arithmetic())
    return tmp_path / "packs"


def read(folder):
    return read_packs(folder, "a" * 64, reads_teacher=True)


def test_rows_hold_what_the_teacher_said_of_them(tmp_path):
    made = write(tmp_path / "packs", documents(300), rows_per_shard=50, model=Arithmetic())
    plain = write(tmp_path / "plain", documents(300))
    manifest, rows = read(tmp_path / "packs")
    assert manifest == made == read_manifest(tmp_path / "packs")
    assert manifest.teacher == Arithmetic.packed
    assert plain.teacher is None
    assert plain.data_fingerprint != made.data_fingerprint
    without = read_packs(tmp_path / "packs", "a" * 64)[1]
    assert without.to_list() == read_packs(tmp_path / "plain", "a" * 64)[1].to_list()
    for row, other in zip(rows, without, strict=True):
        for name, expected in Arithmetic()({name: np.array(x) for name, x in other.items()}).items():
            assert row[name].tolist() == expected.ravel().tolist()
        assert {name: row[name] for name in other} == other  # lists, as ever


def test_six_bytes_for_each(packs):
    manifest, rows = read(packs)
    taught = rows.data.select(TEACHER_COLUMNS)
    assert taught.nbytes / manifest.tokens == pytest.approx(6 * K, abs=1)  # and offsets


def test_a_teacher_that_fails_leaves_nothing(tmp_path):
    class Failing(Arithmetic):
        def __call__(self, row):
            raise InputError("no numbers")

    with pytest.raises(InputError, match="no numbers"):
        write(tmp_path / "packs", documents(50), model=Failing())
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_without_a_teacher_or_with_half_of_one(packs):
    edit_manifest(packs, teacher=None)
    with pytest.raises(InputError, match="its columns are not those of packs"):
        read_packs(packs, "a" * 64)
    edit_manifest(packs, teacher={"model_name": "other"})
    with pytest.raises(InputError, match="not a whole manifest"):
        read(packs)
