"""Config files: what they may say, how they build on others, and all that is said of a bad one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_configs import CASES
from tables import table

from unsloth_pack.errors import InputError, Mistakes
from unsloth_pack.recipe.command_line import given_options, placed_options, train_parser
from unsloth_pack.recipe.config_file import check_mappings, merged, read_config
from unsloth_pack.recipe.flags import flat, option, options_of
from unsloth_pack.recipe.kinds import json_object, path, text, whole
from unsloth_pack.recipe.mistakes import Found
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.other_trainers import FLAGS, GROUPS, REMEDIES
from unsloth_pack.recipe.overrides import split_overrides

THEIRS = sorted((Path(__file__).parent / "theirs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(*arguments):
    return given_options(train_parser(), arguments)


def said_of(content, name="run.yaml"):
    """The lines that a file is refused with."""
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Mistakes) as refused:
        given(f"--config={name}")
    return str(refused.value).splitlines()


def lines_after(name, expected):
    return [f"{name}:{line}" for line in expected.splitlines()]


# ---- what is wrong


@table(("content", "expected"), CASES, ids=[repr(content)[:40] for content, _ in CASES])
def test_every_mistake_has_its_line_and_its_remedy(content, expected):
    assert said_of(content) == lines_after("run.yaml", expected)


@pytest.mark.parametrize("file", THEIRS, ids=lambda file: file.stem)
def test_files_of_other_trainers(file):
    expected = file.with_suffix(".txt").read_text()
    assert said_of(file.read_text()) == lines_after("run.yaml", expected)


def test_there_are_enough_of_them():
    assert len({content for content, _ in CASES}) == len(CASES) >= 60
    assert len(THEIRS) >= 7


@table("name", sorted(FLAGS.keys() | REMEDIES.keys()))
def test_a_name_of_another_trainer_leads_to_one_option_or_to_what_to_do(name):
    """In one line, of which no part was guessed."""
    group, _, last = name.rpartition(".")
    (line,) = said_of(f"{group}:\n  {last}: 1\n" if group else f"{name}: 1\n")
    remedy = f"did you mean {FLAGS[name]}?" if name in FLAGS else REMEDIES[name]
    assert line.endswith(f"; {remedy}")
    assert line.startswith("run.yaml:2: " if group else "run.yaml:1: ")


@table("group", sorted(GROUPS))
def test_an_option_of_ours_in_a_section_of_theirs_is_told(group):
    (line,) = said_of(f"{group}:\n  weight_decay: 1\n")
    assert line == f"run.yaml:2: {group}.weight_decay is unknown; did you mean weight_decay?"


def test_the_mistakes_of_all_files_come_at_once_in_the_order_of_their_lines():
    Path("base.yaml").write_text("model:\n  lr: 1\nr: 0\nr: 1\n")
    content = "seed: x\nbase_config: [base.yaml, gone.yaml]\nfrob: 1\noutput:\n  r: 3\n"
    assert said_of(content) == [
        "run.yaml:1: seed is 'x'; give a whole number of at least 0",
        "run.yaml:2: base_config is 'gone.yaml': No such file or directory; check the path, which begins at "
        "this file's folder",
        "run.yaml:3: frob is unknown; see `unsloth-pack --help`",
        "run.yaml:5: r belongs in adapter, not in output; move it there",
        "base.yaml:2: model.lr is unknown; did you mean learning_rate?",
        "base.yaml:4: r is there twice, first in line 3; keep one of them",
    ]


def test_a_file_of_mistakes_is_not_told_in_full():
    lines = said_of("".join(f"a{n}: 1\n" for n in range(200)))
    assert len(lines) == 51
    assert lines[-1] == "and 150 more; correct these first"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"r: 4\nseed: 1\n\xff: 1\n", "run.yaml:3: not yaml in UTF-8; save the file as UTF-8"),
        ("r: 4\n".encode("utf-16"), "run.yaml:1: not yaml in UTF-8; save the file as UTF-8"),
        (b"r: 4\r\nseed: 1\r\nsede: 1\r\n", "run.yaml:3: sede is unknown; did you mean seed?"),
        (b"\xef\xbb\xbfr: 0\n", "run.yaml:1: r is 0; give a whole number of at least 1"),
        (b"\xef\xbb\xbf", "run.yaml:1: holds no `name: value` lines; write one an option"),
        ("r: " + "[" * 5000, "run.yaml:1: not yaml that can be read: too deeply nested; write it flatter"),
        (
            "r: " + "[" * 800 + "]" * 800,
            "run.yaml:1: not yaml that can be read: too deeply nested; write it flatter",
        ),
        (
            "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else '1'] * 9)}]\n" for i in range(12)),
            "run.yaml:6: not yaml (its aliases hold themselves or too much); correct it",
        ),
        ("r: " + "9" * 5000, "run.yaml:1: not yaml; correct it"),
    ],
    ids=["bytes", "UTF-16", "Windows", "BOM", "BOM alone", "deep", "deep and closed", "laughs", "digits"],
)
def test_unusual_files(content, expected):
    assert said_of(content) == expected.splitlines()


def test_deeply_nested_mappings_are_refused(folder):
    """They are small enough to be read, and too deep to be walked through."""
    nested = "".join(" " * depth + "a:\n" for depth in range(150))
    assert all("run.yaml:" in line for line in said_of(nested))


@pytest.mark.parametrize("name", ["gone.yaml", ".", "/dev/zero", "", "a\0b"])
def test_a_file_that_cannot_be_opened(name):
    with pytest.raises(InputError, match=r"^config is .*; check the path$"):
        given("--config", name)


def test_two_files_are_refused():
    for name in ("a.yaml", "b.yaml"):
        Path(name).write_text("r: 4\n")
    with pytest.raises(InputError, match=r"config is given twice; .* in its base_config"):
        given("--config=a.yaml", "--config", "b.yaml")


# ---- what they may say


def test_options_stand_alone_or_in_their_sections():
    Path("run.yaml").write_text(
        "model: {model_name: 007}\nadapter:\n  r: 4\npacking: true\noutput: null\nseed: 010\n"
    )
    assert given("--config=run.yaml") == {
        "config": "run.yaml",
        "model_name": "007",  # as it is spelt
        "r": 4,
        "sample_packing": True,
        "seed": 10,  # not eight, as YAML 1.1 has it
    }


@pytest.mark.parametrize(
    ("spelt", "value"),
    [
        ("2e-5", 2e-5),
        ("2.e-5", 2e-5),
        (".5", 0.5),
        ("1", 1.0),
        ("1E-4", 1e-4),
        ("'2e-5'", 2e-5),
        ("+1.5", 1.5),
    ],
)
def test_numbers_however_they_are_spelt(spelt, value):
    Path("run.yaml").write_text(f"learning_rate: {spelt}\nloftq_config: {{a: {spelt}}}\n")
    read = given("--config=run.yaml")
    assert read["learning_rate"] == value
    assert type(read["learning_rate"]) is float
    if "'" not in spelt:
        assert read["loftq_config"] == {"a": value}


def test_words_that_yaml_1_1_takes_for_something_else():
    Path("run.yaml").write_text("model_name: no\ndataset: 2026-01-01\noptim: 1e5\nreport_to: off\n")
    read = given("--config=run.yaml")
    assert [read[name] for name in ("model_name", "dataset", "optim", "report_to")] == [
        *("no", "2026-01-01", "1e5", "off")
    ]


def test_anchors_and_merges_within_a_file():
    content = "adapter: &small {r: 4, lora_alpha: 8}\nadapter: {}\n"
    assert said_of(content) == ["run.yaml:2: adapter is there twice, first in line 1; keep one of them"]
    Path("run.yaml").write_text(
        "model: {model_name: &name tiny, max_seq_length: 64}\n"
        "loftq_config: &loftq {a: 1, b: 2}\n"
        "adapter:\n  <<: {r: 4, lora_alpha: 8}\n  r: 2\n"
        "dataset: *name\n"
    )
    read = given("--config=run.yaml")
    assert (read["r"], read["lora_alpha"], read["dataset"], read["model_name"]) == (2, 8.0, "tiny", "tiny")


# ---- base files


def tree(**files):
    """Write files, whose folders are in their names as `a__b` for a/b.yaml."""
    for name, content in files.items():
        file = Path(name.replace("__", "/") + ".yaml")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)


def test_a_chain_of_files_whose_paths_begin_at_each():
    tree(
        root="r: 2\nlora_alpha: 2\nseed: 2\nloftq_config: {a: 2, b: 2, c: 2}\n",
        up__middle="base_config: ../root.yaml\nlora_alpha: 4\nseed: 4\nloftq_config: {b: 4, c: 4}\n",
        up__low__run="base_config: ../middle.yaml\nseed: 8\nadapter: {loftq_config: {c: 8}}\n",
    )
    read = given("--config=up/low/run.yaml", "--max_steps=3")
    assert (read["r"], read["lora_alpha"], read["seed"], read["max_steps"]) == (2, 4.0, 8, 3)
    assert read["loftq_config"] == {"a": 2, "b": 4, "c": 8}
    placed = placed_options(train_parser(), ["--config=up/low/run.yaml", "--seed=9"])
    assert str(placed["r"].place) == "up/low/../../root.yaml:1"
    assert str(placed["lora_alpha"].place) == "up/low/../middle.yaml:2"
    assert placed["seed"].place is None
    assert str(placed["loftq_config"].value["c"].place) == "up/low/run.yaml:3"


def test_several_base_files_of_which_the_last_wins_and_shared_ones():
    tree(
        shared="seed: 1\nr: 1\n",
        one="base_config: shared.yaml\nr: 2\nlora_alpha: 2\n",
        two="base_config: shared.yaml\nlora_alpha: 4\n",
        run="base_config: [one.yaml, two.yaml]\n",
    )
    read = given("--config=run.yaml")
    assert (read["seed"], read["r"], read["lora_alpha"]) == (1, 1, 4.0)


def test_null_restores_the_default_and_what_comes_later_begins_anew():
    tree(
        base="r: 4\nseed: 4\nloftq_config: {a: 1, b: 2}\n",
        null="base_config: base.yaml\nr: null\nloftq_config: null\nmodel: ~\n",
        part="base_config: base.yaml\nloftq_config: {a: null}\n",
        anew="base_config: null.yaml\nr: 8\nloftq_config: {c: 3}\n",
    )
    assert given("--config=null.yaml") == {"config": "null.yaml", "seed": 4}
    assert given("--config=part.yaml")["loftq_config"] == {"b": 2}
    anew = given("--config=anew.yaml")
    assert (anew["r"], anew["loftq_config"]) == (8, {"c": 3})
    assert given("--config=anew.yaml", "--r=null", "--seed", "null", "--loftq_config=null").keys() == {
        "config"
    }


def test_a_longer_cycle_is_named_where_it_closes():
    tree(one="base_config: two.yaml\n", two="r: 4\nbase_config: sub/three.yaml\n")
    tree(sub__three="base_config: ../one.yaml\n")
    with pytest.raises(Mistakes) as refused:
        given("--config=one.yaml")
    (line,) = str(refused.value).splitlines()
    what = "sub/three.yaml:1: base_config is '../one.yaml', which builds on this file"
    assert line == f"{what}; remove it from one of them"


def test_a_link_to_the_file_itself_is_a_cycle_too():
    Path("link.yaml").symlink_to("run.yaml")
    assert "builds on this file" in said_of("base_config: link.yaml\n")[0]


def test_a_chain_without_end_is_cut():
    for n in range(80):
        Path(f"{n}.yaml").write_text(f"base_config: {n + 1}.yaml\n")
    with pytest.raises(Mistakes, match=r"50\.yaml:1: base_config is '51\.yaml', after 51 files; join some"):
        given("--config=0.yaml")


def test_many_files_that_share_many_are_read_once_each():
    for n in range(30):
        Path(f"{n}.yaml").write_text(f"base_config: [{n + 1}.yaml, {n + 1}.yaml, {n + 1}.yaml]\n")
    Path("30.yaml").write_text("r: 3\n")
    assert given("--config=0.yaml")["r"] == 3


# ---- the command line over a file


def test_dotted_flags_set_options_in_their_sections_and_parts_of_mappings():
    Path("run.yaml").write_text("loftq_config: {a: 1, b: x}\nseed: 1\n")
    flags = ["--training.seed=2", "--adapter.r", "4", "--data.packing", "--loftq_config.b", "2e-5"]
    flags += ["--adapter.loftq_config.c=true", "--loftq_config.a=null"]
    read = given("--config=run.yaml", *flags)
    assert read == {
        "config": "run.yaml",
        "seed": 2,
        "r": 4,
        "sample_packing": True,
        "loftq_config": {"b": 2e-5, "c": True},
    }
    assert given('--loftq_config={"a": 1}', "--loftq_config.b=-1")["loftq_config"] == {"a": 1, "b": -1}


def test_a_file_without_a_name():
    with pytest.raises(InputError, match=r"^config is '': no name of a file; check the path$"):
        given("--config=")


def test_names_with_dots_in_a_mapping_of_patterns_or_columns():
    flags = ["--learning_rates.layers.0", "1e-4", "--training.learning_rates..*norm=1e-5"]
    assert given(*flags, "--columns.meta.question=prompt") == {
        "learning_rates": {"layers.0": 1e-4, ".*norm": 1e-5},
        "columns": {"meta.question": "prompt"},
    }


def test_patterns_of_the_upper_file_come_first():
    """Of learning rates the first that matches counts, so that a pattern of a base file cannot hide them."""
    Path("base.yaml").write_text("learning_rates: {layers: 1e-5, norm: 2e-5}\n")
    Path("run.yaml").write_text("base_config: base.yaml\nlearning_rates: {layers.0: 1e-4, norm: 3e-5}\n")
    read = given("--config=run.yaml", "--learning_rates.b=1", "--learning_rates.a=2")["learning_rates"]
    assert [*read.items()] == [("b", 1), ("a", 2), ("layers.0", 1e-4), ("norm", 3e-5), ("layers", 1e-5)]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model.seed=1"], "argument --model.seed: seed is in training; give --seed"),
        (["--seed.a=1"], "argument --seed.a: seed is no mapping; give --seed"),
        (["--loftq_config.a"], "argument --loftq_config.a: a value is missing; give one"),
        (["--loftq_config.a", "--r=1"], "argument --loftq_config.a: a value is missing; give one"),
        (["--training.seed=x"], "argument --seed: got 'x'; give a whole number of at least 0"),
        (["--training.sede=1"], "unknown argument '--sede'; did you mean --seed?"),
        (["--rlhf.beta=1"], f"unknown argument '--rlhf.beta'; {REMEDIES['beta']}"),
        (["--tuner.lora_rank", "8"], "unknown argument '--tuner.lora_rank'; did you mean --r?"),
        (["--frob.nicate=1"], "unknown argument '--frob.nicate'; see `unsloth-pack --help`"),
        (["--training=1"], "unknown argument '--training'; see `unsloth-pack --help`"),
    ],
)
def test_dotted_flags_that_are_wrong(flags, says):
    with pytest.raises(InputError) as refused:
        given(*flags)
    assert str(refused.value) == says


def test_a_mapping_that_the_command_line_spoils_is_its_mistake():
    Path("run.yaml").write_text("loftq_config: {a: 1}\n")
    with pytest.raises(InputError) as refused:
        given("--config=run.yaml", "--loftq_config.a.b=1")
    assert str(refused.value).startswith("loftq_config is a mapping; give a JSON object of single values")
    assert not isinstance(refused.value, Mistakes)


# ---- other dataclasses: nothing is made for `train` alone


@dataclass(frozen=True)
class Icing:
    """On top."""

    colours: Mapping[str, Any] | None = option(None, json_object("{}"), "its colours")


@dataclass(frozen=True)
class Oven:
    """How it is baked."""

    degrees: int = option(180, whole(50), "heat", alias="heat")
    icing: Icing = Icing()


@dataclass(frozen=True)
class Cake:
    name: str = option("Ada", text, "whose")
    recipe: str = option("x", path, "a file")
    oven: Oven = Oven()


def test_sections_within_sections():
    Path("cake.yaml").write_text(
        "name: Bo\noven:\n  heat: 90\n  icing:\n    colours: {top: red}\n    degrees: 4\n"
    )
    found = Found()
    values = read_config(Path("cake.yaml"), Cake, found)
    assert {name: each.plain for name, each in values.items()} == {
        "name": "Bo",
        "degrees": None,
        "colours": {"top": "red"},
    }
    with pytest.raises(Mistakes) as refused:
        found.check()
    assert (*str(refused.value).splitlines(),) == (
        "cake.yaml:6: degrees belongs in oven, not in oven.icing; move it there",
        "cake.yaml:6: degrees is there twice, first in line 3; keep one of them",
        "cake.yaml:6: degrees is 4; give a whole number of at least 50",
    )
    rest, inside = split_overrides(["--oven.icing.colours.top", "blue", "--oven.heat=60"], Cake)
    assert rest == ["--degrees=60"]
    both = merged(values, inside)
    assert both["colours"].plain == {"top": "blue"}
    check_mappings(both, Cake, Found())


def test_every_option_can_be_set_in_a_file_in_either_place():
    known = options_of(TrainOptions)
    for name, value in flat(TrainOptions()).items():
        if name == "config" or value is None:
            continue
        spelt = str(value).lower() if isinstance(value, bool) else value
        section = known[name].path[0]
        for content in (f"{name}: {spelt}\n", f"{section}:\n  {name}: {spelt}\n"):
            Path("run.yaml").write_text(content)
            assert given("--config=run.yaml")[name] == value


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
    lines = [(int(line.split(":")[1]), line.split("; give ", 1)[1]) for line in said]
    assert [number for number, _ in lines] == [4, 5, 6, 7, 8, 9, 13]
    for (_, told), wanted in zip(
        lines,
        [
            "as weight of item 2 (a.jsonl) a number above 0 and below 1e+09, not -3",
            "as limit of item 2 (a.jsonl) a whole number of at least 1, not 0",
            "in the columns of item 3 (b.jsonl) 'a' one of the names",
            "item 3 (b.jsonl) none but the keys path, weight, split, limit, columns, not 'colums'",
            "item 4 a path",
            "item 5 as a path, or an object with a path, not a list",
            "item 2 (c.jsonl) no weight",
        ],
        strict=True,
    ):
        assert told.startswith(wanted)
