import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.build_demo import base_training_rows, write_data
from unsloth_pack.demo import BASE_HELDOUT_FILE, DATA_DIR, HELDOUT_FILE, MODEL_DIR, TRAIN_FILE, user_text
from unsloth_pack.demo.evaluate import exact_match


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="float32")


def test_bundled_data_is_what_the_script_writes(tmp_path):
    write_data(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in DATA_DIR.iterdir()}


def test_heldout_prompts_are_in_no_training_set():
    """Nor does the base model know a command of the fine-tune."""
    train = [user_text(row) for row in read(TRAIN_FILE)]
    heldout = [user_text(row) for row in read(HELDOUT_FILE)]
    assert len(train) == len(set(train)) >= 1000
    assert len(heldout) == len(set(heldout)) >= 100
    assert not set(train) & set(heldout)

    base = [*base_training_rows(5_000)]
    assert not {user_text(row) for row in read(BASE_HELDOUT_FILE)} & {user_text(row) for row in base}
    commands = {row["instruction"].split()[0] for row in read(TRAIN_FILE)}
    text = "\n".join(f"{user_text(row)}\n{row['output']}" for row in base)
    assert len(commands) == 8
    assert not [command for command in commands if command.lower() in text.lower()]


def test_base_model_answers_what_it_was_trained_on(model, tokenizer):
    """And nothing of the fine-tune."""
    assert exact_match(model, tokenizer, read(BASE_HELDOUT_FILE)).score >= 0.95
    result = exact_match(model, tokenizer, read(HELDOUT_FILE))
    assert result.score <= 0.10
    assert np.mean([bool(generation.answer) for generation in result.generations]) >= 0.9


def test_exact_match_keeps_the_order_of_rows_and_is_the_same_in_any_batch(model, tokenizer):
    rows = read(BASE_HELDOUT_FILE)[:12]
    together = exact_match(model, tokenizer, rows, batch_size=12)
    alone = [exact_match(model, tokenizer, [row]).generations[0] for row in rows]
    assert together.generations == alone
    assert len({generation.answer for generation in alone}) > 1
    assert [generation.expected for generation in together.generations] == [row["output"] for row in rows]
