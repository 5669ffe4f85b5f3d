"""Options: their types, defaults, flags and help, and what they say of a value that they do not take."""

import pytest
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
    ("r", "1e3", 1000),
    ("r", " 8 ", 8),
    ("learning_rate", "3", 3.0),
    ("weight_decay", "1e-3", 0.001),
    ("sample_packing", "True", True),
    ("freeze_vit", "off", False),
    ("eval_packing", "false", False),
    ("use_gradient_checkpointing", "offload", "offload"),
    ("use_gradient_checkpointing", "False", False),
    ("loftq_config", '{"a": 1, "b": "x", "c": true, "d": 1e-4}', {"a": 1, "b": "x", "c": True, "d": 1e-4}),
    ("loftq_config", "{}", {}),
    ("optim_args", "momentum=0.9,nesterov=true,x=a", {"momentum": 0.9, "nesterov": True, "x": "a"}),
    ("learning_rates", '{"lm_head": 1, "(a|b)": 1e-5}', {"lm_head": 1.0, "(a|b)": 1e-5}),
    ("target_modules", "q_proj, v_proj", ["q_proj", "v_proj"]),
    ("target_modules", "all-linear", "all-linear"),
    ("target_modules", r".*\.q_proj", r".*\.q_proj"),
    ("modules_to_save", '["lm_head"]', ["lm_head"]),
    ("train_modules", "a|b,c", ["a|b,c"]),
    ("freeze_modules", '["a", "b"]', ["a", "b"]),
    ("layers_to_transform", "0,1", [0, 1]),
    ("trainable_token_indices", "[7]", [7]),
    ("report_to", "7", "7"),
    ("dataset", "a.jsonl", "a.jsonl"),
    ("dataset", " a.jsonl , b.jsonl", [A, B]),
    ("dataset", '["a.jsonl", {"path": "b.jsonl", "weight": 2}]', [A, B | {"weight": 2.0}]),
    ("dataset", '{"path": "a.jsonl", "limit": 3, "split": null}', [A | {"limit": 3}]),
    ("dataset", '[{"path": "a.jsonl"}]', "a.jsonl"),
    ("dataset", '["a,b.jsonl"]', [{"path": "a,b.jsonl"}]),
    ("dataset", '[{"path": "a.jsonl", "columns": {}}]', [A | {"columns": {}}]),
    (
        "dataset",
        '[{"path": "a.jsonl", "columns": "q=prompt,id="}]',
        [A | {"columns": {"q": "prompt", "id": None}}],
    ),
    ("dataset", "data/*.jsonl.gz", "data/*.jsonl.gz"),
    ("columns", " q = prompt , a = completion,id=", {"q": "prompt", "a": "completion", "id": None}),
    ("columns", '{"a=b": "prompt", "c,d": null}', {"a=b": "prompt", "c,d": None}),
]


@table(("name", "text", "value"), VALUES)
def test_flags_read_text_and_a_resumed_run_reads_what_it_wrote(name, text, value):
    read = load([f"--{name}={text}"]).given[name]
    assert (read, type(read)) == (value, type(value))
    assert read_record({name: read}, "record") == {name: value}


def test_a_file_with_a_comma_in_its_name(folder):
    for name in ("a,b.jsonl", "[1].jsonl"):
        (folder / name).write_text("")
    assert load(["--dataset=a,b.jsonl"]).data.dataset == [{"path": "a,b.jsonl"}]
    assert load(["--dataset=[1].jsonl"]).data.dataset == "[1].jsonl"


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
    ("r", "0", "r is 0; give a whole number of at least 1"),
    ("r", "1.5", "r is 1.5; give a whole number of at least 1"),
    ("seed", "nan", "seed is nan; give a whole number from 0 to 4294967295"),
    ("learning_rate", "inf", "learning_rate is inf; give a number above 0 and below 1e+09"),
    ("sample_packing", "maybe", "sample_packing is 'maybe'; give true or false"),
    ("layers_to_transform", "0,x", "is a list; give whole numbers of at least 0, with commas between them"),
    ("target_modules", "(", "is '('; give a regular expression (missing ), unterminated subpattern"),
    ("freeze_modules", '["a", "("]', "item 2 is '('; give a regular expression (missing )"),
    ("modules_to_save", ",", "is a list; give names with commas between them, such as q_proj,v_proj"),
    ("learning_rates", '{"norm": 0}', "norm is 0; give a number above 0 and below 1e+09"),
    ("split", " ", "split is ' '; give the name of a split, such as validation"),
    ("dataset", "[]", "dataset is a list; give at least one"),
    ("dataset", "a.jsonl,,b.jsonl", "item 2, path is ''; give a path"),
    ("dataset", '[{"path": "a.jsonl"', "data sets as JSON, such as"),
    ("dataset", '["a", true]', "item 2 is true; give a path, or an object with a path"),
    ("dataset", '[{"path": "a", "weight": "much"}]', "item 1, weight is 'much'; give a number above 0"),
    ("dataset", '[{"path": "a", "split": ["b"]}]', "item 1, split is a list; give the name of a split"),
    ("eval_dataset", '[{"path": "a", "weight": 2}]', "item 1, weight is unknown; use path, split, limit, "),
    ("columns", "question", "columns is 'question'; give name=value pairs"),
    ("columns", "q=promt", "q is 'promt'; give one of chat_template_kwargs, completion, "),
    ("columns", "q=prompt,r=prompt", "is a mapping; give each column another name, not 'prompt' twice"),
    ("columns", "q=prompt,q=completion", "is 'q=prompt,q=completion'; give name=value pairs"),
]


@table(("name", "text", "says"), REFUSED)
def test_what_an_option_does_not_take(name, text, says):
    line = refusal(f"--{name}={text}")
    assert line.startswith(name)
    assert says in line
    assert "\n" not in line


def test_all_flags_that_are_wrong_are_told_at_once():
    assert refusal("--seed") == "argument --seed: expected one argument; see `unsloth-pack --help`"
    said = refusal("--r=9.5", "--frob", "3", "--packing=maybe", "--lerning_rate=7").splitlines()
    assert said == [
        "r is 9.5; give a whole number of at least 1",
        "sample_packing is 'maybe'; give true or false",
        "unknown argument '--frob'; see `unsloth-pack --help`",
        "unknown argument '--lerning_rate'; did you mean --learning_rate?",
    ]
