"""Config files: what they may say, how they build on others, and all that is said of a bad one."""

from pathlib import Path

import pytest
from bad_configs import CASES
from tables import table

from unsloth_pack.config import OPTIONS, load
from unsloth_pack.config.names import other_trainers
from unsloth_pack.errors import InputError, Mistakes
from unsloth_pack.run.validate import check_sure

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
        load(["--config=run.yaml", *flags], check=check_sure)
    return str(refused.value).splitlines()


# ---- what is wrong


@table(("content", "expected"), CASES, ids=[repr(content)[:40] for content, _ in CASES])
def test_every_mistake_has_its_line_and_its_remedy(content, expected):
    lines = said_of(content)
    assert lines == [f"run.yaml:{line}" for line in expected.splitlines()]
    assert all("; " in line for line in lines)


@table("file", THEIRS, ids=lambda file: file.stem)
def test_files_of_other_trainers(file):
    expected = file.with_suffix(".txt").read_text()
    assert said_of(file.read_text()) == [f"run.yaml:{line}" for line in expected.splitlines()]


def test_names_of_other_trainers_lead_to_one_option_or_to_what_to_do():
    same, instead, sections = other_trainers()
    assert {*same.values()} <= OPTIONS.keys()
    assert not (same.keys() | instead.keys()) & OPTIONS.keys()
    plain = {name: remedy for name, remedy in instead.items() if "." not in name}
    plain |= {name: f"did you mean {ours}?" for name, ours in same.items() if "." not in name}
    lines = said_of("".join(f"{name}: 1\n" for name in plain))
    for line, remedy in zip(lines, plain.values(), strict=True):
        assert line.endswith(f"; {remedy}")
    lines = said_of("".join(f"{section}: {{weight_decay: 1, beta: 1}}\n" for section in sections))
    assert lines[::2] == [
        f"run.yaml:{number + 1}: {section}.weight_decay is unknown; did you mean weight_decay?"
        for number, section in enumerate(sections)
    ]
    assert said_of("lora: {r: 4, rank: 4}")[1] == "run.yaml:1: lora.rank is unknown; did you mean r?"


def test_the_mistakes_of_all_files_and_of_the_command_line_come_at_once():
    write(base="model:\n  lr: 1\nr: 0\nr: 1\n")
    content = "seed: x\nbase_config: [base.yaml, gone.yaml]\nfrob: 1\noutput:\n  r: 3\n"
    assert said_of(content, "--columns.q=nonsense")[:-1] == [
        "run.yaml:1: seed is 'x'; give a whole number from 0 to 4294967295",
        "run.yaml:2: base_config is 'gone.yaml': No such file or directory; check the path from this file's "
        "folder",
        "run.yaml:3: frob is unknown; see `unsloth-pack --help`",
        "run.yaml:5: r belongs in adapter, not in output; move it there",
        "base.yaml:2: model.lr is unknown; did you mean learning_rate?",
        "base.yaml:4: r is there twice, first in line 3; keep one of them",
    ]
    assert said_of(content, "--columns.q=nonsense")[-1].startswith("columns: q is 'nonsense'; give one of ")


@table(
    ("content", "expected"),
    [
        (b"r: 4\nseed: 1\n\xff: 1\n", "run.yaml:3: not yaml in UTF-8; save the file as UTF-8"),
        ("r: 4\n".encode("utf-16"), "run.yaml:1: not yaml in UTF-8; save the file as UTF-8"),
        (b"r: 4\r\nseed: 1\r\nsede: 1\r\n", "run.yaml:3: sede is unknown; did you mean seed?"),
        (b"\xef\xbb\xbfr: 0\n", "run.yaml:1: r is 0; give a whole number of at least 1"),
    ],
    ids=["bytes", "UTF-16", "Windows", "BOM"],
)
def test_unusual_files(content, expected):
    assert said_of(content) == [expected]


@table("name", ["gone.yaml", ".", ""])
def test_a_file_that_cannot_be_opened(name):
    with pytest.raises(InputError, match=r"^config is .*; check the path$"):
        given("--config", name)


def test_every_mistake_in_a_list_of_data_sets_has_the_line_of_its_key():
    said = said_of("""\
dataset:
  - demo
  - path: a.jsonl
    weight: -3
    limit: 0
  - {path: b.jsonl, columns: {a: nonsense},
     colums: {}}
  - weight: 2
  - [4]
eval_dataset:
  - &one {path: c.jsonl}
  - <<: *one
    weight: 3
""")
    for line, wanted in zip(
        said,
        [
            "4: dataset: item 2, weight is -3; give a number above 0 and below 1e+09",
            "5: dataset: item 2, limit is 0; give a whole number of at least 1",
            "6: dataset: item 3, columns, a is 'nonsense'; give one of chat_template_kwargs, ",
            "7: dataset: item 3, colums is unknown; use path, split, limit, columns, weight",
            "8: dataset: item 4, path is missing; give one",
            "9: dataset: item 5 is a list; give a path, or an object with a path",
            "13: eval_dataset: item 2, weight is unknown; use path, split, limit, columns",
        ],
        strict=True,
    ):
        assert line.startswith(f"run.yaml:{wanted}")


# ---- what they may say


def test_every_option_can_be_set_at_the_top_or_in_its_section():
    for name, option in OPTIONS.items():
        if name != "config" and option.default is not None:
            spelt = str(option.default).lower() if isinstance(option.default, bool) else option.default
            for content in (f"{name}: {spelt}\n", f"{option.section}:\n  {name}: {spelt}\n"):
                write(run=content)
                assert given("--config=run.yaml")[name] == option.default


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


def test_a_file_that_builds_on_itself_is_told_where_the_circle_closes():
    write(one="base_config: two.yaml\n", two="r: 4\nbase_config: sub/three.yaml\n")
    write(sub__three="base_config: ../one.yaml\n")
    what = "sub/three.yaml:1: base_config is '../one.yaml': it builds on this file"
    with pytest.raises(Mistakes, match=f"^{what}; remove it from one of them$"):
        given("--config=one.yaml")
    Path("link.yaml").symlink_to("run.yaml")
    assert "builds on this file" in said_of("base_config: link.yaml\n")[0]


# ---- the command line over a file


def test_dotted_flags_set_options_in_their_sections_and_parts_of_mappings():
    write(run="loftq_config: {a: 1, b: x}\nseed: 1\n")
    flags = ["--training.seed=2", "--adapter.r", "4", "--data.packing", "--loftq_config.b", "2e-5"]
    flags += ["--adapter.loftq_config.c=true", "--loftq_config.a=null"]
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
        (["--model.seed=1"], "argument --model.seed: seed is in training; give --seed"),
        (["--seed.a=1"], "argument --seed.a: seed is no mapping; give --seed"),
        (["--loftq_config.a"], "argument --loftq_config.a: a value is missing; give one"),
        (["--loftq_config.a", "--r=1"], "argument --loftq_config.a: a value is missing; give one"),
        (["--training.seed=x"], "seed is 'x'; give a whole number from 0 to 4294967295"),
        (["--training.sede=1"], "unknown argument '--sede'; did you mean --seed?"),
        (["--tuner.lora_rank", "8"], "unknown argument '--tuner.lora_rank'; did you mean --r?"),
        (["--frob.nicate=1"], "unknown argument '--frob.nicate'; see `unsloth-pack --help`"),
        (["--training=1"], "unknown argument '--training'; see `unsloth-pack --help`"),
    ],
)
def test_dotted_flags_that_are_wrong(flags, says):
    with pytest.raises(InputError) as refused:
        given(*flags)
    assert str(refused.value) == says
