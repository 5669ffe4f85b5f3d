import datasets
import pytest

from unsloth_pack.data import check_token_ids
from unsloth_pack.errors import InputError

VALID = datasets.Dataset.from_dict({"input_ids": [[0, 1], [], [9], [3, 4, 5]]})


def error_of(dataset, vocab_size):
    with pytest.raises(InputError) as caught:
        check_token_ids(dataset, vocab_size)
    return str(caught.value)


def test_the_ids_of_a_vocabulary_pass_from_the_first_to_the_last():
    check_token_ids(VALID, 10)
    assert "row 2, column 'input_ids': token id 9 is outside the vocabulary, 0 to 8" in error_of(VALID, 9)
    below = datasets.Dataset.from_dict({"input_ids": [[0, -1]]})
    assert "row 0, column 'input_ids': token id -1 is outside" in error_of(below, 10)


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_id_outside_the_vocabulary(bad):
    rows = datasets.Dataset.from_dict({"input_ids": [[0, 1], [], [2, bad], [bad]]})
    message = error_of(rows, 10)
    assert f"row 2, column 'input_ids': token id {bad} is outside the vocabulary, 0 to 9 (10 ids)" in message
    assert "tokenizer of this model" in message


def test_rows_are_those_of_the_view_and_past_the_first_batch():
    rows = datasets.Dataset.from_dict({"input_ids": [[99]] + [[1]] * 12_000})
    assert "row 12000," in error_of(rows.select([*range(1, 12_001), 0]), 10)


def test_null_ids_and_null_rows():
    rows = datasets.Dataset.from_dict({"input_ids": [None, [1], [1, None]]})
    assert "row 2, column 'input_ids': token id None" in error_of(rows, 10)


def test_what_is_not_token_ids():
    assert "no column 'input_ids' among text; tokenise" in error_of(
        datasets.Dataset.from_dict({"text": ["a"]}), 10
    )
    floats = datasets.Dataset.from_dict({"input_ids": [[0.5]]})
    assert "holds list<item: double>, not lists of integers" in error_of(floats, 10).replace(
        "element", "item"
    )
