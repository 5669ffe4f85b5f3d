"""The schema that editors check config files with agrees with what `train` says."""

import json
import re

import jsonschema
import pytest
import yaml
from tables import table

from unsloth_pack.cli.recipe import recipe_names, recipe_text
from unsloth_pack.config import OPTIONS, json_schema


class Yaml12(yaml.SafeLoader):
    """Reads numbers as an editor does."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)
SCHEMA = json.loads(json.dumps(json_schema()))


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    return jsonschema.Draft7Validator(SCHEMA)


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


BAD = [
    "learning_rat: 1",
    "r: 0",
    "r: [4]",
    "bias: some",
    "model: {r: 4}",
    "tuner: {r: 4}",
    "dataset: {weight: 2}",
]


@table("content", GOOD, ids=[content[:40] for content in GOOD])
def test_good_files(content, validator):
    assert not [*validator.iter_errors(yaml.load(content, Yaml12))]


@table("content", BAD)
def test_what_train_refuses_an_editor_marks(content, validator):
    assert not validator.is_valid(yaml.load(content, Yaml12))


@table("name", [name for name in OPTIONS if name != "config"])
def test_an_option_is_the_same_at_the_top_and_in_its_section(name, validator):
    option, at_the_top = OPTIONS[name], SCHEMA["properties"][name]
    assert at_the_top == SCHEMA["properties"][option.section]["properties"][name]
    assert at_the_top["description"] == f"{option.help} (default: {option.shown_default})"
    assert validator.is_valid({name: option.default})
    assert validator.is_valid({name: None})
