import datasets
import pytest

from unsloth_pack.data import check_token_ids
from unsloth_pack.errors import InputError


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [[0, 1], [], [9, -1]],
            "row 2, column 'input_ids': token id -1 is outside the vocabulary, 0 to 9 (10 ",
        ),
        ([[1]] * 12_000 + [[0, 99]], "row 12000, column 'input_ids': token id 99 is outside"),
        ([None, [1], [1, None]], "row 2, column 'input_ids': token id None is outside"),
    ],
)
def test_an_id_without_an_embedding_is_named(rows, says):
    with pytest.raises(InputError) as raised:
        check_token_ids(datasets.Dataset.from_dict({"input_ids": rows}), 10)
    assert says in str(raised.value)


def test_the_ids_of_a_vocabulary_pass_from_the_first_to_the_last():
    check_token_ids(datasets.Dataset.from_dict({"input_ids": [[0, 1], [], [9]]}), 10)
