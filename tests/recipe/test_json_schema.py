"""The schema that editors check config files with agrees with what `train` says."""

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path

import jsonschema
import pytest
from bad_configs import CASES
from tables import table

from unsloth_pack.recipe.config_file import read_config
from unsloth_pack.recipe.flags import options_of
from unsloth_pack.recipe.json_schema import json_schema
from unsloth_pack.recipe.kinds import Kind
from unsloth_pack.recipe.library import recipe_names, recipe_text
from unsloth_pack.recipe.mistakes import Found
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.yaml_file import read_yaml

SCHEMA = json.loads(json.dumps(json_schema(TrainOptions)))
# What only the files themselves can tell, or YAML; and that JSON has no such number
UNSEEN = r"twice|base_config is '|not yaml|not plain yaml|holds no|stands where a name|is nan"
SEEN = [content for content, lines in CASES if not re.search(UNSEEN, lines)]


@pytest.fixture
def validator():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    return jsonschema.Draft7Validator(SCHEMA)


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "run.yaml").write_text(content)
        values = read_yaml(tmp_path / "run.yaml", Found())
        return {name: with_nulls(each) for name, each in values.items()}

    return read


def with_nulls(placed):
    is_mapping = isinstance(placed.value, dict)
    return {name: with_nulls(each) for name, each in placed.value.items()} if is_mapping else placed.value


GOOD = [
    "{}",
    "base_config: base.yaml",
    "base_config: [a.yaml, b.yaml]\nr: 4\nadapter: {lora_alpha: 8}",
    "learning_rate: 2e-5\npacking: true\nloftq_config: {loftq_bits: 4, loftq_iter: null}",
    "model: null\nr: null\ndtype: null\neval_packing: ~\nuse_gradient_checkpointing: null",
    "use_gradient_checkpointing: offload\ntraining: {use_gradient_checkpointing: true}",
]


@pytest.mark.parametrize("content", GOOD)
def test_good_files(content, validator, read):
    assert validator.is_valid(read(content))


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_good_files(name, validator, read):
    assert validator.is_valid(read(recipe_text(name)))


@table("content", SEEN, ids=[repr(content)[:40] for content in SEEN])
def test_what_train_refuses_an_editor_marks(content, validator, read):
    assert not validator.is_valid(read(content))


def test_there_are_enough_of_them():
    assert len(SEEN) >= 60


def test_files_of_other_trainers_are_marked(validator, read):
    for file in (Path(__file__).parent / "theirs").glob("*.yaml"):
        marked = {
            error.absolute_path[0] if error.absolute_path else ""
            for error in validator.iter_errors(read(file.read_text()))
        }
        assert "" in marked, file.name


@table("name", sorted(options_of(TrainOptions).keys() - {"config"}))
def test_every_option_is_there_twice_with_its_help_its_default_and_its_type(name, validator):
    option = options_of(TrainOptions)[name]
    at_the_top = SCHEMA["properties"][name]
    assert at_the_top == SCHEMA["properties"][option.path[0]]["properties"][name]
    assert at_the_top["description"] == f"{option.help} (default: {option.shown_default})"
    assert isinstance(option.kind, Kind)
    assert {"type", "enum", "anyOf"} & at_the_top.keys()
    if option.default is not None:
        assert at_the_top["default"] == option.default
        assert validator.is_valid({name: option.default})
    assert validator.is_valid({name: None})
    assert not validator.is_valid({name: [[]]})


def is_taken(option, value):
    """Whether a file may have the value; text takes a number as it is spelt."""
    is_spelt = option.kind.is_text and type(value) in (int, float)
    try:
        option.kind(str(value) if is_spelt else value)
    except (ValueError, TypeError, ArgumentTypeError):
        return False
    return True


def test_a_schema_says_what_its_kind_says():
    """Of every value in reach: numbers, words and switches."""
    values = [-1, 0, 1, 2, 0.5, 2**31, True, False, {}, *("sft", "none", "all", "auto", "float16", "x")]
    for name, option in options_of(TrainOptions).items():
        validator = jsonschema.Draft7Validator(SCHEMA["properties"].get(name, {}))
        if name == "config":
            continue
        for value in values:
            assert validator.is_valid(value) is is_taken(option, value), (name, value)


QUOTED = [
    *("2e-5", "8", " 8 ", "+8", "0", "-1", "0.5", ".5", "5.", "1_000", "1e3", "true", "True", "FALSE", "yes"),
    *("", " ", "null", "a,b", "1,2", "[0, 1]", "0,", "a=1", "=", '["a"]', "lora_B", "1.10"),
]
NESTED = [
    *(1e3, 1.5, -1.0, [], ["a"], [""], [1], ["1"], [1.0], [0.5], [True], [None], [[1]]),
    *({"a": 1}, {"a": "1e-4"}, {"a": "x"}, {"a": 0}, {"a": True}, {"a": [1]}, {"a": {}}, {"a": "prompt"}),
    *({"a": ""}, {"path": "x"}, {"path": ""}, {"path": 5}, {"path": "x", "weight": "2"}, [{"path": "x"}]),
    *([{"path": "x", "weight": 0}], [{"path": "x", "limit": "3"}], {"path": "x", "limit": 1.0}),
    *({"path": "x", "split": " "}, {"path": "x", "columns": {}}, {"path": "x", "columns": "a=prompt"}),
    *({"path": "x", "columns": "a"}, {"path": "x", "frob": 1}),
]
# What no pattern can say: bounds of a number in quotes, names between commas, regular expressions
NOT_BELOW_1 = {"8", " 8 ", "+8", "5.", "1_000", "1e3", "1.10"}
COARSE = {
    **dict.fromkeys(("lora_dropout", "eval_fraction", "warmup_ratio"), NOT_BELOW_1),
    "lora_plus_ratio": {"2e-5", "0.5", ".5"},
    "modules_to_save": {"0,", "[0, 1]"},
    "target_modules": {"0,", "+8"},
    "train_modules": {"+8"},
    "freeze_modules": {"+8"},
    "dataset": {"0,"},
    "eval_dataset": {"0,"},
    "columns": {"a=1", "="},
    "optim_args": {"="},
}


@table("name", sorted(options_of(TrainOptions).keys() - {"config"}))
def test_quotes_lists_and_mappings_mean_the_same_to_both(name):
    option, validator = options_of(TrainOptions)[name], jsonschema.Draft7Validator(SCHEMA["properties"][name])
    for value in [*QUOTED, *NESTED]:
        is_coarse = isinstance(value, str) and value in COARSE.get(name, ())
        assert validator.is_valid(value) is (is_taken(option, value) or is_coarse), value


@pytest.mark.parametrize("value", [None, "base.yaml", ["base.yaml"], [], "", [""], [None], 4, True, {}, [4]])
def test_what_a_base_may_be(value, validator, tmp_path):
    (tmp_path / "base.yaml").write_text("r: 4")
    (tmp_path / "run.yaml").write_text(json.dumps({"base_config": value}))
    found = Found()
    read_config(tmp_path / "run.yaml", TrainOptions, found)
    assert validator.is_valid({"base_config": value}) is (not found)
