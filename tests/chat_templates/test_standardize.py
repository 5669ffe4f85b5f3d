import pytest
from datasets import Dataset

from unsloth_pack import InputError
from unsloth_pack.chat_templates import standardize_data_formats, standardize_sharegpt

SHAREGPT = [
    {"from": "system", "value": "S"},
    {"from": "human", "value": "Q"},
    {"from": "gpt", "value": "A"},
    {"from": "observation", "value": "5"},
]
PLAIN = [
    {"role": role, "content": content}
    for role, content in (("system", "S"), ("user", "Q"), ("assistant", "A"), ("tool", "5"))
]


def rows(turns):
    return Dataset.from_dict({"conversations": [turns] * 3, "id": [1, 2, 3]})


@pytest.mark.parametrize("turns", [SHAREGPT, PLAIN], ids=["sharegpt", "plain"])
def test_forms(turns):
    made = standardize_sharegpt(rows(turns))
    assert made[1]["conversations"] == PLAIN
    assert made["id"] == [1, 2, 3]


def test_a_stream():
    made = standardize_data_formats(rows(SHAREGPT).to_iterable_dataset())
    assert [row["conversations"] for row in made] == [PLAIN] * 3


def test_aliases():
    turns = [{"from": "frage", "value": "Q"}, {"from": "antwort", "value": "A"}]
    made = standardize_sharegpt(rows(turns), aliases_for_user=["frage"], aliases_for_assistant=["antwort"])
    assert made[0]["conversations"] == PLAIN[1:3]


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        (
            [{"from": "narrator", "value": "x"}],
            "row 0, column 'conversations': turn 0 is .'from': 'narrator'",
        ),
        ([{"from": "human", "value": None}], "turn 0 is .'from': 'human', 'value': None"),
        (["x"], "turn 0 is 'x'"),
        ("x", "'x' is no list"),
    ],
)
def test_refusals(turns, says):
    with pytest.raises(InputError, match=says):
        standardize_sharegpt(rows(turns))


def test_what_has_no_conversations():
    data = Dataset.from_dict({"text": ["a"]})
    assert standardize_sharegpt(data) is data
    with pytest.raises(InputError, match="dataset is a dict"):
        standardize_sharegpt({"train": data})
