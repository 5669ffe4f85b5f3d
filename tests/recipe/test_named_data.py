"""What `--dataset` and `--columns` take, on the command line and in a file, and how they refuse the rest."""

import pytest
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.command_line import given_options, train_parser
from unsloth_pack.recipe.data_kinds import column_names, data_sets
from unsloth_pack.recipe.flags import read_values
from unsloth_pack.recipe.kinds import Refused
from unsloth_pack.recipe.named_data import data_sets_of
from unsloth_pack.recipe.options import TrainOptions

A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}


@table(
    ("given", "read"),
    [
        ("a.jsonl", "a.jsonl"),
        ("a.jsonl,b.jsonl", [A, B]),
        (" a.jsonl , b.jsonl", [A, B]),
        ('["a.jsonl", {"path": "b.jsonl", "weight": 2}]', [A, B | {"weight": 2.0}]),
        ('{"path": "a.jsonl", "limit": 3}', [A | {"limit": 3}]),
        ('{"path": "a.jsonl"}', "a.jsonl"),
        ('["a.jsonl"]', "a.jsonl"),
        ('["a,b.jsonl"]', [{"path": "a,b.jsonl"}]),
        (["a.jsonl", {"path": "b.jsonl", "split": "test", "limit": None}], [A, B | {"split": "test"}]),
        ([{"path": "a.jsonl", "columns": {"q": "prompt", "id": None}}], None),
        ([A, B | {"columns": {}}], [A, B | {"columns": {}}]),
        ("owner/name", "owner/name"),
        ("data/*.jsonl.gz", "data/*.jsonl.gz"),
    ],
)
def test_data_sets(given, read):
    found = data_sets(given)
    assert found == (read or [A | {"columns": {"q": "prompt", "id": None}}])
    assert data_sets(found) == found, "a resumed run reads what it wrote"


def test_a_file_with_a_comma_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.jsonl").write_text("")
    (tmp_path / "[1].jsonl").write_text("")
    found = data_sets("a,b.jsonl")
    assert found == [{"path": "a,b.jsonl"}]
    assert data_sets("[1].jsonl") == "[1].jsonl"
    (tmp_path / "a,b.jsonl").unlink()
    assert data_sets(found) == found


@table(
    ("given", "says"),
    [
        ([], "at least one data set"),
        ([A, {"weight": 2}], "item 2 a path"),
        ([A, {"path": " "}], "item 2 a path"),
        ([A, 5.5, [B]], "item 3 as a path, or an object with a path, not a list"),
        ([A, True], "item 2 as a path"),
        ([A, None], "item 2 as a path"),
        ([A, B | {"wieght": 2}], "item 2 (b.jsonl) none but the keys path, weight, split, limit, columns"),
        ([A, B | {"weight": 0}], "as weight of item 2 (b.jsonl) a number above 0 and below 1e+09, not 0"),
        ([A, B | {"weight": -1}], "as weight of item 2 (b.jsonl) a number above 0 and below 1e+09, not -1"),
        ([A, B | {"weight": float("nan")}], "as weight of item 2 (b.jsonl) a number above 0"),
        ([A, B | {"weight": float("inf")}], "as weight of item 2 (b.jsonl) a number above 0"),
        ([A, B | {"weight": True}], "as weight of item 2 (b.jsonl) a number above 0"),
        ([A, B | {"weight": "much"}], "not 'much'"),
        ([A, B | {"limit": 0}], "as limit of item 2 (b.jsonl) a whole number of at least 1, not 0"),
        (
            [A, B | {"split": ["a"]}],
            "as split of item 2 (b.jsonl) the name of a split, such as validation, not a list",
        ),
        ([A, B | {"columns": {"q": "promt"}}], "in the columns of item 2 (b.jsonl) 'q' one of the names"),
        ([A, B | {"columns": {"q": "prompt", "r": "prompt"}}], "'q' and 'r' different names, not both"),
        ('[{"path": "a.jsonl"', "a list of data sets as JSON"),
        ("a.jsonl,,b.jsonl", "item 2 a path"),
        ({"a.jsonl": 2}, "item 1 a path"),
        (True, "text in quotes"),
    ],
)
def test_what_is_no_data_set(given, says):
    with pytest.raises(Refused) as caught:
        data_sets(given)
    assert says in str(caught.value)
    with pytest.raises(InputError) as raised:
        read_values(TrainOptions, {"dataset": given}, "config is 'c.yaml'")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("question=prompt,answer=completion", {"question": "prompt", "answer": "completion"}),
        (" q = prompt , a = completion", {"q": "prompt", "a": "completion"}),
        ("id=", {"id": None}),
        ('{"a=b": "prompt", "c,d": null}', {"a=b": "prompt", "c,d": None}),
        ({"q": "prompt", "id": None}, {"q": "prompt", "id": None}),
        ({"output": "input", "input": "output"}, {"output": "input", "input": "output"}),
    ],
)
def test_columns(given, read):
    assert column_names(given) == read
    assert column_names(read) == read


@table(
    ("given", "says"),
    [
        ("question", "a mapping of columns, such as question=prompt,answer=completion"),
        ("=prompt", "a mapping of columns"),
        ("", "a mapping of columns"),
        ({}, "a mapping of columns"),
        (["a"], "a mapping of columns"),
        ("q=promt", "'q' one of the names"),
        ("q=promt", "not 'promt'"),
        ("q=prompt,r=prompt", "'q' and 'r' different names, not both 'prompt'"),
        ("q=prompt,q=completion", "'q' one name, not several"),
        ('{"q": ', "an object, such as"),
        ({"q": ["prompt"]}, "'q' one of the names"),
        ({"q": 5}, "not 5"),
    ],
)
def test_what_is_no_mapping_of_columns(given, says):
    with pytest.raises(Refused) as caught:
        column_names(given)
    assert says in str(caught.value)


def test_a_config_file_and_the_command_line_say_the_same(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "dataset:\n- path: a.jsonl\n  weight: 2\n- b.jsonl\n"
        "columns: {question: prompt, id: null}\nsplit: test\n"
    )
    parser = train_parser()
    of_file = given_options(parser, ["--config", str(tmp_path / "c.yaml")])
    of_flags = given_options(
        parser,
        [
            '--dataset=[{"path": "a.jsonl", "weight": 2}, "b.jsonl"]',
            "--columns=question=prompt,id=",
            "--split=test",
        ],
    )
    assert {name: of_file[name] for name in of_flags} == of_flags
    assert of_flags["columns"] == {"question": "prompt", "id": None}


@pytest.mark.parametrize(
    "flags",
    [
        ["--columns=images="],
        ['--columns={"images": null}'],
        ["--config=c.yaml"],
        ["--columns.images", "null"],
    ],
    ids=str,
)
def test_a_column_alone_is_left_out_everywhere(flags, tmp_path, monkeypatch):
    """null restores the default of other mappings' parts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("columns: {images: text}\n")
    (tmp_path / "c.yaml").write_text("base_config: base.yaml\ncolumns: {images: null}\n")
    assert given_options(train_parser(), flags)["columns"] == {"images": None}


def test_what_holds_for_all_data_sets():
    first, second = data_sets_of([A, B | {"columns": {"x": "text"}, "split": "dev"}], {"q": "prompt"}, "test")
    assert (first.columns, first.split) == ({"q": "prompt"}, "test")
    assert (second.columns, second.split) == ({"x": "text"}, "dev")
    assert not first.shares_columns
    first, second, third = data_sets_of([A, B, B | {"columns": {}}], {"q": "prompt"})
    assert first.shares_columns
    assert second.for_rows_with(["messages"]).columns == {}
    assert second.for_rows_with(["q", "a"]).columns == {"q": "prompt"}
    assert third.columns == {}


@table(
    ("flag", "says"),
    [
        ("--val_set_size=500", "give eval_fraction, a share of the documents; of a number of them, that"),
        ("--split_dataset_ratio=0.1", "did you mean --eval_fraction?"),
        ("--mix_strategy=concat", "give mixture: concatenate for concat or interleave_once, else"),
        ("--stopping_strategy=first_exhausted", "give mixture: interleave_under for first_exhausted"),
        ("--interleave_probs=0.5,0.5", "give each data set a weight in dataset"),
        ("--max_samples=5", "give each data set a limit in dataset, or sample_limit, which holds for all"),
        ("--max_train_samples=5", "did you mean --sample_limit?"),
        ("--mixture=interleave", "one of concatenate, interleave_under, interleave_over"),
        ("--eval_fraction=1", "above 0 and below 1"),
        ("--eval_fraction=0", "above 0 and below 1"),
        ("--sample_limit=0", "at least 1"),
        (
            '--eval_dataset=[{"path": "a.jsonl", "weight": 2}]',
            "item 1 (a.jsonl) no weight: it is evaluated on",
        ),
    ],
)
def test_flags_of_other_trainers_and_wrong_values(flag, says):
    with pytest.raises(InputError) as caught:
        train_parser().parse([flag])
    assert says in str(caught.value)
