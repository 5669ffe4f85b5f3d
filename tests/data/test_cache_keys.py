"""What is kept of prepared data for some options is not taken for others."""

import json
from datetime import date

import datasets
import pytest
from model_folder import TEMPLATE, byte_tokenizer

from unsloth_pack.data import rows_hash
from unsloth_pack.data.tokenize import documents_of, key_of_tokenizer
from unsloth_pack.packing.dataset import pack_documents

TURNS = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
OTHER_TEMPLATE = TEMPLATE.replace("[{{ m.role }}]", "<{{ m.role }}>")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Too many to be held, so that their documents are kept."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("unsloth_pack.data.cache._ROWS", 3)
    return datasets.Dataset.from_list([{"messages": TURNS}] * 8)


@pytest.mark.parametrize(
    "option",
    [{"max_length": 20}, {"train_on_responses_only": True}, {"chat_template": OTHER_TEMPLATE}],
    ids=lambda option: next(iter(option)),
)
def test_documents_of_another_option(option, rows):
    kept = documents_of(rows, byte_tokenizer(), max_length=99, num_proc=1)
    others = documents_of(rows, byte_tokenizer(), **{"max_length": 99, "num_proc": 1, **option})
    assert kept.rows.cache_files
    assert others.rows[:] != kept.rows[:]
    assert others.fingerprint != kept.fingerprint


def test_saved_data_sets_of_one_fingerprint(rows, tmp_path):
    """`datasets` believes what a folder says of itself, whatever its files hold by now."""
    others = rows.map(lambda row: {"messages": [*row["messages"], *TURNS]})
    made = []
    for name, of_folder in (("one", rows), ("other", others)):
        of_folder.save_to_disk(tmp_path / name)
        path = tmp_path / name / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "_fingerprint": "same"}))
        saved = datasets.load_from_disk(tmp_path / name)
        made.append(documents_of(saved, byte_tokenizer(), max_length=99, num_proc=1))
    assert made[0].fingerprint != made[1].fingerprint


def test_a_fingerprint_is_of_where_rows_end():
    def hashed(*rows):
        return rows_hash(datasets.Dataset.from_dict({"input_ids": [*rows], "labels": [*rows]}))

    assert len({hashed([1, 2], [3]), hashed([1], [2, 3]), hashed([1, 2, 3])}) == 3


def test_rows_of_another_length(rows):
    documents = documents_of(rows, byte_tokenizer(), max_length=99, num_proc=1)
    for capacity in (200, 99):
        packed = pack_documents(documents, capacity, num_proc=1)
        assert packed.cache_files
        assert max(map(len, packed["input_ids"])) > capacity / 2
        assert max(map(len, packed["input_ids"])) <= capacity


def test_a_template_that_writes_the_date_is_kept_for_a_day(monkeypatch):
    dated, plain = byte_tokenizer(TEMPLATE + "{{ strftime_now('%d') }}"), byte_tokenizer()
    keys = [key_of_tokenizer(dated), key_of_tokenizer(plain)]

    class Tomorrow(date):
        @classmethod
        def today(cls):
            return date.fromordinal(date.today().toordinal() + 1)

    monkeypatch.setattr("unsloth_pack.data.tokenize.date", Tomorrow)
    assert key_of_tokenizer(dated) != keys[0]
    assert key_of_tokenizer(plain) == keys[1]
