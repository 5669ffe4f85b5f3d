"""Options: their types, defaults, flags and help, and what they say of a value that they do not take."""

from importlib.resources import files

import pytest
import yaml
from pydantic import ValidationError
from tables import table

from unsloth_pack.attention.backends import BACKENDS
from unsloth_pack.config import (
    OPTIONS,
    SECTIONS,
    TrainOptions,
    changed,
    flat,
    load,
    read_record,
)
from unsloth_pack.config.options import nested
from unsloth_pack.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*flags):
    with pytest.raises(InputError) as refused:
        load(flags)
    return str(refused.value)


def test_options_cannot_be_changed_and_what_is_not_given_is_not_there():
    options = load(["--packing", "--seed=1"])
    assert options.given == {"sample_packing": True, "seed": 1}
    assert flat(options) == flat(TrainOptions()) | options.given
    assert flat(changed(options, {"seed": 3407, "sample_packing": False})) == flat(TrainOptions())
    with pytest.raises(ValidationError, match="frozen"):
        options.training.seed = 2
    with pytest.raises(KeyError, match="sugar"):
        nested({"sugar": 1})


def test_every_option_has_a_name_of_its_own_a_type_a_default_and_help():
    assert len(OPTIONS) == sum(len(kind.model_fields) for kind in SECTIONS.values())
    assert all(kind.__doc__ for kind in SECTIONS.values())
    texts = yaml.safe_load(files("unsloth_pack").joinpath("config/options.yaml").read_text())
    assert {s: [*of] for s, of in texts.items()} == {s: [*k.model_fields] for s, k in SECTIONS.items()}
    for name, option in OPTIONS.items():
        assert option.help, name
        assert option.shown_default, name
        assert option.unit, name
        if option.default is not None:
            for value in (option.default, str(option.default)):
                read = read_record({name: value}, "record")[name]
                assert (read, type(read)) == (option.default, type(option.default))
    assert {*OPTIONS["attn_backend"].types} == {"auto", *BACKENDS}


A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}
VALUES = [
    ("weight_decay", "1e-3", 0.001),
    ("sample_packing", "True", True),
    ("use_gradient_checkpointing", "offload", "offload"),
    ("loftq_config", '{"a": 1, "b": "x", "c": true, "d": 1e-4}', {"a": 1, "b": "x", "c": True, "d": 1e-4}),
    ("optim_args", "momentum=0.9,nesterov=true,x=a", {"momentum": 0.9, "nesterov": True, "x": "a"}),
    ("learning_rates", '{"lm_head": 1, "(a|b)": 1e-5}', {"lm_head": 1.0, "(a|b)": 1e-5}),
    ("target_modules", "q_proj, v_proj", ["q_proj", "v_proj"]),
    ("train_modules", "a|b,c", ["a|b,c"]),
    ("freeze_modules", '["a", "b"]', ["a", "b"]),
    ("trainable_token_indices", "[7]", [7]),
    ("dataset", "a.jsonl", "a.jsonl"),
    ("dataset", " a.jsonl , b.jsonl", [A, B]),
    ("dataset", '{"path": "a.jsonl", "limit": 3, "split": null}', [A | {"limit": 3}]),
    ("dataset", '[{"path": "a.jsonl"}]', "a.jsonl"),
    (
        "dataset",
        '[{"path": "a.jsonl", "columns": "q=prompt,id="}]',
        [A | {"columns": {"q": "prompt", "id": None}}],
    ),
    ("columns", " q = prompt , a = completion,id=", {"q": "prompt", "a": "completion", "id": None}),
]


@table(("name", "text", "value"), VALUES)
def test_flags_read_text_and_a_resumed_run_reads_what_it_wrote(name, text, value):
    read = load([f"--{name}={text}"]).given[name]
    assert (read, type(read)) == (value, type(value))
    assert read_record({name: read}, "record") == {name: value}


def test_flags_that_stand_alone_and_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = load(["--fsdp", "--resume", "--use_gradient_checkpointing", "--output_dir=~/out"]).given
    assert given == {
        "fsdp": "full",
        "resume": True,
        "use_gradient_checkpointing": True,
        "output_dir": "/home/me/out",
    }


REFUSED = [
    ("r", "1.5", "r is '1.5'; it should be a valid integer"),
    ("learning_rate", "nan", "learning_rate is 'nan'; it should be less than 1000000000"),
    ("sample_packing", "maybe", "sample_packing is 'maybe'; it should be a valid boolean"),
    (
        "use_gradient_checkpointing",
        "often",
        "is 'often'; it should be True, False, 'offload', 'unsloth' or 'auto'",
    ),
    ("layers_to_transform", "0,x", "layers_to_transform, item 2 is 'x'; it should be a valid integer"),
    ("target_modules", "(", "is '('; give a regular expression (missing ), unterminated subpattern"),
    ("modules_to_save", ",", "modules_to_save, item 1 is ''; it should have at least 1 character"),
    ("learning_rates", '{"norm": 0}', "learning_rates, norm is 0; it should be greater than 0"),
    ("dataset", "a.jsonl,,b.jsonl", "dataset, item 2, path is ''; it should not be blank"),
    ("dataset", '[{"path": "a.jsonl"', "; give correct JSON (Expecting"),
    (
        "dataset",
        '[{"path": "a", "weight": "much"}]',
        "dataset, item 1, weight is 'much'; it should be a valid",
    ),
    ("eval_dataset", '[{"path": "a", "weight": 2}]', "item 1, weight is unknown; leave it out"),
    ("optim_args", "eps", "optim_args is 'eps'; it should be a valid dictionary"),
    ("columns", "q=promt", "columns, q is 'promt'; it should be "),
    ("columns", "q=prompt,r=prompt", "; give each column another name"),
]


@table(("name", "text", "says"), REFUSED)
def test_what_an_option_does_not_take(name, text, says):
    lines = refusal(f"--{name}={text}").splitlines()
    assert any(line.startswith(name) and says in line for line in lines)


def test_all_flags_that_are_wrong_are_told_at_once():
    assert refusal("--seed") == "argument --seed: expected one argument; see `unsloth-pack --help`"
    assert refusal("--frob", "3", "--lerning_rate=7").splitlines() == [
        "unknown argument '--frob'; see `unsloth-pack --help`",
        "unknown argument '--lerning_rate'; did you mean --learning_rate?",
    ]
    assert len(refusal("--r=9.5", "--packing=maybe").splitlines()) == 2
