"""Config files: what they may say, how they build on others, and all that is said of a bad one."""

from pathlib import Path

import pytest
from tables import table

from unsloth_pack.config import load
from unsloth_pack.errors import InputError, Mistakes

THEIRS = sorted((Path(__file__).parent / "theirs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(**files):
    """Write files, whose folders are in their names as `a__b` for a/b.yaml."""
    for name, content in files.items():
        file = Path(name.replace("__", "/") + ".yaml")
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def given(*arguments):
    return load(arguments).given


def said_of(content, *flags):
    """The lines that a file is refused with."""
    write(run=content)
    with pytest.raises(Mistakes) as refused:
        load(["--config=run.yaml", *flags])
    return str(refused.value).splitlines()


# ---- what is wrong


CASES = [
    ("learning_rat: 1e-4", "1: learning_rat is unknown; did you mean learning_rate?"),
    ("use_lora: true", "1: use_lora is unknown; give tuning: lora, or tuning: full"),
    ("r: 0", "1: r is '0'; it should be greater than or equal to 1"),
    ("bias: some", "1: bias is 'some'; it should be 'none', 'all' or 'lora_only'"),
    ("dataset: {weight: 2}", "1: dataset, item 1, path is missing; give it"),
    ("model:\n  learning_rate: 1e-4", "2: learning_rate belongs in training, not in model; move it there"),
    (
        "training:\n  r: 4\n  seed: 0.5",
        "2: r belongs in adapter, not in training; move it there\n"
        "3: seed is '0.5'; it should be a valid integer",
    ),
    ("model: Qwen/Qwen2.5-0.5B", "1: model is a section, not a value; did you mean model_name?"),
    ("r: 4\nadapter:\n  r: 8", "3: r is there twice; keep one of them"),
    ("base_config: run.yaml", "1: base_config is 'run.yaml': it builds on this file; correct it"),
    ("base_config: gone.yaml", "1: base_config is 'gone.yaml': No such file or directory; correct it"),
    ("hub_token: 'hf_secret\nr: 4", "2: not yaml; correct it"),
    ("- r", "1: holds no `name: value` lines; write one an option"),
    ("r: !frob 4", "1: a tag stands here; leave it out"),
]


@table(("content", "expected"), CASES, ids=[repr(content)[:40] for content, _ in CASES])
def test_every_mistake_has_its_line_and_its_remedy(content, expected):
    lines = said_of(content)
    assert lines == [f"run.yaml:{line}" for line in expected.splitlines()]
    assert all("; " in line for line in lines)


@table("file", THEIRS, ids=lambda file: file.stem)
def test_files_of_other_trainers(file):
    expected = file.with_suffix(".txt").read_text()
    assert said_of(file.read_text()) == [f"run.yaml:{line}" for line in expected.splitlines()]


# ---- what they may say


@table(
    ("content", "values"),
    [
        ("model: {model_name: 007}\npacking: true\noutput: ~", {"model_name": "007", "sample_packing": True}),
        ("seed: 010", {"seed": 10}),  # not eight, as YAML 1.1 has it
        *(
            (f"learning_rate: {text}", {"learning_rate": 2e-5})
            for text in ("2e-5", "2.E-5", "'2e-5'", "+2e-5")
        ),
        ("loftq_config: {a: .5, b: 1, c: 'x'}", {"loftq_config": {"a": 0.5, "b": 1, "c": "x"}}),
        (
            "model_name: no\nreport_to: off\noptim: 1e5",
            {"model_name": "no", "report_to": "off", "optim": "1e5"},
        ),
        ("dataset: 2026-01-01", {"dataset": "2026-01-01"}),
        ("model_name: &n tiny\ndataset: *n", {"model_name": "tiny", "dataset": "tiny"}),
        ("adapter:\n  <<: {r: 4, lora_alpha: 8}\n  r: 2", {"r": 2, "lora_alpha": 8.0}),
    ],
)
def test_values_are_read_as_yaml_1_2_has_them(content, values):
    write(run=content)
    read = given("--config=run.yaml")
    assert read == {**values, "config": "run.yaml"}
    assert {name: type(value) for name, value in read.items() if name in values} == {
        name: type(value) for name, value in values.items()
    }


def test_a_config_file_and_the_command_line_say_the_same():
    write(
        run="dataset:\n- path: a.jsonl\n  weight: 2\n- b.jsonl\ncolumns: {question: prompt, id: null}\n"
        "split: test\ntarget_modules: [q_proj, v_proj]\noptim_args: {eps: 1e-8}\n"
    )
    flags = ['--dataset=[{"path": "a.jsonl", "weight": 2}, "b.jsonl"]', "--columns=question=prompt,id="]
    flags += ["--split=test", "--target_modules=q_proj,v_proj", "--optim_args=eps=1e-8"]
    assert given("--config=run.yaml") == {**given(*flags), "config": "run.yaml"}


# ---- base files


def test_a_chain_of_files_whose_paths_begin_at_each():
    write(
        root="r: 2\nlora_alpha: 2\nseed: 2\nloftq_config: {a: 2, b: 2, c: 2}\n",
        up__middle="base_config: ../root.yaml\nlora_alpha: 4\nseed: 4\nloftq_config: {b: 4, c: 4}\n",
        up__low__run="base_config: ../middle.yaml\nseed: 8\nadapter: {loftq_config: {c: 8}}\n",
    )
    options = load(["--config=up/low/run.yaml", "--max_steps=3", "--seed=9", "--loftq_config.d=1"])
    assert (options.adapter.r, options.adapter.lora_alpha, options.training.max_steps) == (2, 4.0, 3)
    assert options.adapter.loftq_config == {"a": 2, "b": 4, "c": 8, "d": 1}
    assert options.place_of("r") == ("up/low/../../root.yaml", 1)
    assert options.place_of("lora_alpha") == ("up/low/../middle.yaml", 2)
    assert options.place_of("loftq_config.c") == ("up/low/run.yaml", 3)
    assert options.place_of("seed") is options.place_of("loftq_config.d") is None


def test_null_restores_the_default_and_what_comes_later_begins_anew():
    write(
        base="r: 4\nseed: 4\nloftq_config: {a: 1, b: 2}\n",
        null="base_config: base.yaml\nr: null\nloftq_config: null\nmodel: ~\n",
        part="base_config: base.yaml\nloftq_config: {a: null}\n",
        anew="base_config: null.yaml\nr: 8\nloftq_config: {c: 3}\n",
    )
    assert given("--config=null.yaml") == {"config": "null.yaml", "seed": 4}
    assert given("--config=part.yaml")["loftq_config"] == {"b": 2}
    anew = given("--config=anew.yaml")
    assert (anew["r"], anew["loftq_config"]) == (8, {"c": 3})
    nulls = ["--r=null", "--seed", "null", "--loftq_config=null"]
    assert given("--config=anew.yaml", *nulls).keys() == {"config"}


# ---- the command line over a file


def test_dotted_flags_set_options_in_their_sections_and_parts_of_mappings():
    write(run="loftq_config: {a: 1, b: x}\nseed: 1\n")
    flags = ["--training.seed=2", "--adapter.r", "4", "--data.packing", "--loftq_config.b", "2e-5"]
    flags += ["--adapter.loftq_config.c=true", "--loftq_config.a=null"]
    flags = ["--seed=3", *flags]  # of equal flags the last counts
    read = {"config": "run.yaml", "seed": 2, "r": 4, "sample_packing": True}
    assert given("--config=run.yaml", *flags) == read | {"loftq_config": {"b": 2e-5, "c": True}}
    assert given('--loftq_config={"a": 1}', "--loftq_config.b=-1")["loftq_config"] == {"a": 1, "b": -1}
    flags = ["--learning_rates.layers.0", "1e-4", "--training.learning_rates..*norm=1e-5"]
    assert given(*flags, "--columns.meta.question=prompt") == {
        "learning_rates": {"layers.0": 1e-4, ".*norm": 1e-5},
        "columns": {"meta.question": "prompt"},
    }


def test_patterns_of_the_upper_file_come_first():
    """Of learning rates the first that matches counts, so that a pattern of a base file cannot hide them."""
    write(base="learning_rates: {layers: 1e-5, norm: 2e-5}\n")
    write(run="base_config: base.yaml\nlearning_rates: {layers.0: 1e-4, norm: 3e-5}\n")
    read = given("--config=run.yaml", "--learning_rates.b=1", "--learning_rates.a=2")["learning_rates"]
    assert [*read.items()] == [("b", 1), ("a", 2), ("layers.0", 1e-4), ("norm", 3e-5), ("layers", 1e-5)]


@table(
    ("flags", "says"),
    [
        (
            ["--dataset=a", "--data.dataset=b"],
            "--dataset is given twice; give it once, with all",
        ),
        (["--model.seed=1"], "unknown argument '--model.seed'; did you mean --seed?"),
        (["--loftq_config.a"], "argument --loftq_config.a: expected one argument; give it a value"),
        (["--tuner.lora_rank", "8"], "unknown argument '--tuner.lora_rank'; did you mean --r?"),
    ],
)
def test_dotted_flags_that_are_wrong(flags, says):
    with pytest.raises(InputError) as refused:
        given(*flags)
    assert str(refused.value).startswith(says)
