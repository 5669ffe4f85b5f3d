"""The schema that editors check config files with agrees with what `train` says."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from bad_configs import CASES
from tables import table

from unsloth_pack.cli.recipe import recipe_names, recipe_text
from unsloth_pack.config import OPTIONS, json_schema, load
from unsloth_pack.config.yaml12 import Loader
from unsloth_pack.errors import InputError

SCHEMA = json.loads(json.dumps(json_schema()))
# What only the files themselves can tell, or YAML; and that JSON has no such number
UNSEEN = r"twice|base_config is '|not yaml|holds no|stands where a name|is nan|are set together|has a tag"
SEEN = [content for content, lines in CASES if not re.search(UNSEEN, lines) and "!" not in content]


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    return jsonschema.Draft7Validator(SCHEMA)


def read(content):
    """A file as an editor has it."""
    values = yaml.load(content, Loader)
    return {str(name): value for name, value in values.items()}


GOOD = [
    "{}",
    "base_config: [a.yaml, b.yaml]\nr: 4\nadapter: {lora_alpha: 8}",
    "learning_rate: 2e-5\npacking: true\nloftq_config: {loftq_bits: 4, loftq_iter: null}",
    "model: null\nr: null\ndtype: null\neval_packing: ~\nuse_gradient_checkpointing: null",
    "use_gradient_checkpointing: offload\ntraining: {use_gradient_checkpointing: true}",
    "dataset: a.jsonl,b.jsonl\ncolumns: q=prompt,id=\noptim_args: eps=1e-8",
    "dataset: {path: a, weight: 2}\ncolumns: {q: prompt, id: null}\noptim_args: {eps: 1e-8, x: true}",
    "dataset: [a, {path: b, split: test, limit: 3, columns: {}}]\neval_dataset: [{path: b}]",
    "target_modules: q_proj,v_proj\nmodules_to_save: [lm_head]\nlayers_to_transform: 0,1\ntrain_modules: a|b",
    "layers_to_transform: [0, 1]\ntarget_modules: all-linear\nlearning_rates: {norm: 1e-5}",
    *map(recipe_text, recipe_names()),
]


@table("content", GOOD, ids=[content[:40] for content in GOOD])
def test_good_files(content, validator):
    assert not [*validator.iter_errors(read(content))]


@table("content", SEEN, ids=[repr(content)[:40] for content in SEEN])
def test_what_train_refuses_an_editor_marks(content, validator):
    assert not validator.is_valid(read(content))


def test_files_of_other_trainers_are_marked(validator):
    assert len(SEEN) >= 40
    for file in (Path(__file__).parent / "theirs").glob("*.yaml"):
        assert not validator.is_valid(read(file.read_text())), file.name


VALUES = [
    -1,
    0,
    1,
    2,
    0.5,
    2**31,
    True,
    {},
    "sft",
    "none",
    "auto",
    "float16",
    "x",
    [],
    ["a"],
    [1],
    [[]],
    [True],
]
VALUES += [{"a": 1}, {"a": "x"}, {"a": [1]}, {"a": "prompt"}, {"path": "x"}, {"path": "x", "frob": 1}]
VALUES += [[{"path": "x", "weight": 0}], [{"path": "x", "limit": 3}], {"path": "x", "columns": {"q": "text"}}]


@table("name", [name for name in OPTIONS if name != "config"])
def test_an_option_says_what_its_type_says_at_the_top_and_in_its_section(name, validator, tmp_path):
    """But for bare 0 and 1 as switches, and one value in place of a list, which `train` takes too."""
    option, file = OPTIONS[name], tmp_path / "run.yaml"
    at_the_top = SCHEMA["properties"][name]
    assert at_the_top == SCHEMA["properties"][option.section]["properties"][name]
    assert at_the_top["description"] == f"{option.help} (default: {option.shown_default})"
    assert at_the_top.get("default") == option.default
    assert validator.is_valid({name: option.default})
    assert validator.is_valid({name: None})
    if isinstance(option.default, int | float):
        assert validator.is_valid({name: str(option.default).lower()})  # in quotes
    for value in VALUES:
        file.write_text(json.dumps({name: value}))
        try:
            load([f"--config={file}"])
            is_taken = True
        except InputError:
            is_taken = False
        is_marked = not validator.is_valid({name: value})
        is_lax = type(value) in (int, float, bool) and bool({bool, str, list} & {*option.types})
        assert is_marked != is_taken or (is_marked and is_taken and is_lax), value


@table("value", [None, "base.yaml", ["base.yaml"], [], "", [""], [None], 4, True, {}, [4]], ids=str)
def test_what_a_base_may_be(value, validator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("r: 4")
    Path("run.yaml").write_text(json.dumps({"base_config": value}))
    try:
        load(["--config=run.yaml"])
        is_taken = True
    except InputError:
        is_taken = False
    assert validator.is_valid({"base_config": value}) is is_taken
