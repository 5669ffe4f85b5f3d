"""`unsloth-pack config` and `unsloth-pack recipe`: they look and copy, and load nothing."""

import json
import os
import re
from pathlib import Path

import pytest
from command_options import read_options
from tables import table

from unsloth_pack.cli import main
from unsloth_pack.cli.recipe import recipe_names, recipe_text
from unsloth_pack.config import flat, load, telling_places
from unsloth_pack.errors import InputError
from unsloth_pack.run.folder import save_config


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def said(capsys):
    def run(*command):
        capsys.readouterr()
        assert main(command) == 0
        return capsys.readouterr().out

    return run


def origins(shown):
    """`{name: (value, origin)}` of what `config show` prints."""
    found = re.findall(r"^ +(\w+):(?: (.*?))? +# (.*)$", shown, re.MULTILINE)
    return {name: (value, origin) for name, value, origin in found}


def test_show_says_where_every_value_comes_from(said):
    Path("base.yaml").write_text("dataset: rows.json\nr: 4\nloftq_config: {loftq_bits: 4, loftq_iter: 1}\n")
    Path("run.yaml").write_text("base_config: base.yaml\ntraining:\n  seed: 1\n  learning_rate: 2e-5\n")
    shown = said("config", "show", "run.yaml", "--seed=7", "--loftq_config.loftq_iter=2", "--packing")
    seen = origins(shown)
    assert seen["r"] == ("4", "base.yaml:2")
    assert seen["dataset"] == ("rows.json", "base.yaml:1")
    assert seen["learning_rate"] == ("2.0e-05", "run.yaml:4")
    assert seen["seed"] == ("7", "command line")
    assert (seen["loftq_bits"], seen["loftq_iter"]) == (("4", "base.yaml:3"), ("2", "command line"))
    assert seen["lora_alpha"] == ("16.0", "default")
    assert seen["max_steps"] == ("400", "follows from other options")
    assert seen["optim"] == ("null", "default: adamw_torch; on CUDA its fused form")
    assert seen["output_dir"] == ("null", "default: outputs/<model>-<dataset>-<time>-<4 random digits>")
    every = flat(read_options([])).keys() - {
        "config",
        "dry_run",
        "resume",
        "overwrite_output_dir",
        "loftq_config",
    }
    assert seen.keys() == every | {"loftq_bits", "loftq_iter"}


def test_what_show_prints_is_a_config_file_of_the_same_run(said):
    flags = ["--dataset=rows.json", "--dtype=float32", "--loftq_config.loftq_bits=4", "--lora_dropout=1e-3"]
    Path("shown.yaml").write_text(said("config", "show", *flags))
    read = flat(read_options(["--config=shown.yaml", "--output_dir=out"]))
    assert read == flat(read_options([*flags, "--output_dir=out"])) | {"config": "shown.yaml"}


@pytest.mark.parametrize(
    ("flags", "decided"),
    [
        (["--warmup_ratio=0.1"], {"warmup_steps": "warmup_ratio"}),
        (["--lr_scheduler_type=constant"], {"warmup_steps": "lr_scheduler_type"}),
        (["--effective_batch_size=32"], {"gradient_accumulation_steps": "effective_batch_size"}),
        (["--tuning=full"], {"lora_alpha": "tuning", "r": "tuning"}),
    ],
)
def test_what_another_option_decides_is_left_to_it(flags, decided, said):
    """A file that gives both is refused, so it could not be run again."""
    shown = said("config", "show", *flags)
    seen = origins(shown)
    for name, by in decided.items():
        assert seen[name] == ("null", f"follows from {by}")
    Path("shown.yaml").write_text(shown)
    options = read_options([*flags, "--output_dir=out"])
    options.output.folder.mkdir()
    save_config(options)
    for file in ("shown.yaml", "out/config.yaml"):
        read = flat(read_options([f"--config={file}", "--output_dir=out"]))
        assert read == flat(options) | {"config": file}


def test_show_of_the_demo_names_its_defaults(said):
    seen = origins(said("config", "show"))
    assert seen["learning_rate"] == ("0.002", "default of the demo")
    assert seen["weight_decay"] == ("0.0", "default of the demo")


def test_check_says_all_that_is_wrong_and_nothing_else(said, capsys):
    Path("run.yaml").write_text("dataset: no/such\nmodel_name: no/such\n")  # may be on the hub
    assert said("config", "check", "run.yaml") == "run.yaml: no mistakes\n"
    assert said("config", "check", "--config=run.yaml") == "run.yaml: no mistakes\n"
    Path("run.yaml").write_text("sede: 1\nr: 0\n")
    assert main(["config", "check", "run.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "run.yaml:1: sede is unknown; did you mean seed?",
        "run.yaml:2: r is '0'; it should be greater than or equal to 1",
    ]


@table(
    ("command", "says"),
    [
        (["config", "sho"], "config has no action 'sho'; use one of show, check, schema"),
        (["config", "check"], "config check is given no file; name one"),
        (["config", "check", "gone.yaml"], "config is 'gone.yaml': No such file or directory; check"),
        (["config", "check", "a.yaml", "b.yaml"], "config check takes one file, and is given 'b.yaml' too"),
        (["config", "show", "a.yaml", "--config=b.yaml"], "--config is given twice; give it once, "),
        (["recipe", "frob"], "recipe has no action 'frob'; use one of list, show, copy"),
        (["recipe", "show"], "recipe show is given no name; choose one of "),
        (["recipe", "copy", "../demo"], "there is no recipe '../demo'; choose one of "),
        (["recipe", "copy", "qlora", "file"], "folder is 'file', but "),
    ],
)
def test_what_is_refused(command, says, capsys):
    Path("file").write_text("mine")
    Path("a.yaml").write_text("r: 4\n")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == ["a.yaml", "file"]


@pytest.mark.parametrize("name", recipe_names())
def test_show_prints_the_file_and_copy_brings_what_it_builds_on(name, said):
    assert said("recipe", "show", name) == said("recipe", "show", f"{name}.yaml") == recipe_text(name)
    assert f"run it with: unsloth-pack --config new/{name}.yaml" in said("recipe", "copy", name, "new")
    assert Path("new", f"{name}.yaml").read_text() == recipe_text(name)
    assert said("config", "check", f"new/{name}.yaml") == f"new/{name}.yaml: no mistakes\n"
    said("recipe", "copy", name, "new")  # they are there already, and the same


def test_a_second_stage_is_looked_at_before_the_first_has_run(said):
    said("recipe", "copy", "stage2")
    assert "  init_adapter: outputs/stage1 " in said("config", "show", "stage2.yaml")
    Path("outputs/stage1").mkdir(parents=True)
    with pytest.raises(InputError, match=r"init_adapter 'outputs/stage1' holds no adapter_config\.json"):
        read_options(["--config=stage2.yaml"])


def test_copy_replaces_nothing(capsys):
    Path("stages.yaml").write_text("mine")
    assert main(["recipe", "copy", "stage1"]) == 2
    assert "'stages.yaml' is there already; give another folder, or move it" in capsys.readouterr().err
    assert os.listdir() == ["stages.yaml"]
    Path("link.yaml").symlink_to("gone")
    Path("stages.yaml").unlink()
    Path("stage1.yaml").symlink_to("gone")
    assert main(["recipe", "copy", "stage1"]) == 2
    assert not Path("gone").exists()


def said_of(capsys, *command):
    """The lines that a command is refused with."""
    assert main(list(command)) == 2
    return capsys.readouterr().err.splitlines()


WRONG = [
    (
        "warmup_steps: 3\nwarmup_ratio: 0.1\neffective_batch_size: 7\nper_device_train_batch_size: 2\n"
        "save_path: x\noptim_args: {beta7: 1}\neval_steps: 4\ntuning: full\nr: 4\n",
        [
            *("2: warmup_ratio is 0.1", "3: effective_batch_size is 7", "5: save_path is 'x'"),
            *(
                "6: optim_args has 'beta7'",
                "7: eval_steps is 4, which needs another option; give",
                "8: tuning is 'full' and r is 4",
            ),
        ],
    ),
    (
        "target_modules: q_prj\nmodules_to_save: [lm_hed]\nfreeze_modules: layers.99\n",
        [
            *("1: target_modules names 'q_prj'; the model has", "2: modules_to_save names 'lm_hed'; the"),
            "3: freeze_modules holds 'layers.99', which",
        ],
    ),
    (
        "freeze_modules: [norm, embed_tokens]\ntrainable_token_indices: [5]\n",
        ["2: trainable_token_indices trains model.embed_tokens, and freeze_modules freezes it"],
    ),
    (
        "init_adapter: adapter\nr: 4\nlora_alpha: 3\n",
        ["1: init_adapter 'adapter' has r 8, not 4", "1: init_adapter 'adapter' has lora_alpha 16"],
    ),
    (
        "min_pixels: 9\nmax_pixels: 4\nimage_folder: gone\nmodel_name: vision-demo\n",
        ["1: min_pixels is 9 and max_pixels is 4", "3: image_folder is 'gone', which is no folder"],
    ),
]


@table("command", (["config", "check", "run.yaml"], ["--config=run.yaml"]))
@table(("text", "told"), WRONG)
def test_check_and_train_tell_the_same_lines(command, text, told, capsys):
    Path("adapter").mkdir(exist_ok=True)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "demo", "r": 8, "lora_alpha": 16}
    Path("adapter/adapter_config.json").write_text(json.dumps(adapter | {"target_modules": ["q_proj"]}))
    Path("run.yaml").write_text(text)
    for line, part in zip(said_of(capsys, *command), told, strict=True):
        assert line.startswith(f"run.yaml:{part}")


@table(
    ("text", "place"),
    [
        ("target_modules names 'w_proj'", "a.yaml:2"),
        ("init_adapter 'x' has r 8, not 4", "run.yaml:2"),  # the first comes from the command line
        ("dataset is no good", "a.yaml:4"),
        ("optim_args has 'eps', which", "run.yaml:3"),
        ("the value 'r' of seed", None),  # a word in quotes is no name
    ],
    ids=str,
)
def test_the_line_that_a_mistake_is_told_of(text, place):
    Path("a.yaml").write_text(
        "# base\ntarget_modules: q_proj\nmax_seq_length: 9\ndataset:\n- path: a.jsonl\n- path: b.jsonl\n"
        "  split: test\n- c\n"
    )
    Path("run.yaml").write_text("base_config: a.yaml\nr: 4\noptim_args:\n  eps: 1e-6\n  beta1: 0.5\n")
    asked = load(["--config=run.yaml", "--init_adapter=x"])
    with pytest.raises(InputError) as told, telling_places(asked):
        raise InputError(f"{text}; the remedy")
    assert str(told.value) == f"{place}: {text}; the remedy" if place else f"{text}; the remedy"


def test_a_rank_and_rows_that_a_model_here_has_no_room_for_are_told(capsys):
    Path("run.yaml").write_text("model_name: demo\nr: 700\nmax_seq_length: 100000\nuse_dora: true\n")
    assert main(["config", "check", "run.yaml"]) == 2
    rank, rows = capsys.readouterr().err.splitlines()
    assert rank == "run.yaml:2: r is 700; give a whole number from 1 to 128"
    assert rows.startswith("run.yaml:3: max_seq_length is 100000, demo has 2048 positions; lower it")
    Path("run.yaml").write_text("model_name: demo\nr: 128\nmax_seq_length: 2048\n")
    assert main(["config", "check", "run.yaml"]) == 0


def test_a_recipe_is_copied_under_another_name(said):
    assert "copied to mine.yaml (with stages.yaml); run it with" in said(
        "recipe", "copy", "stage1", "mine.yaml"
    )
    assert said("config", "check", "mine.yaml") == "mine.yaml: no mistakes\n"
    assert sorted(os.listdir()) == ["mine.yaml", "stages.yaml"]
