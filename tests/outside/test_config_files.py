"""Config files as their users have them: in other folders, on other systems, from a run, from a recipe."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import unsloth_pack
from unsloth_pack.cli import main

CLI = Path(__file__).parents[2] / "cli.py"
pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp_path")


@pytest.fixture
def project(tmp_path, model_folder):
    """A model and data, named relative to the folder that a run starts in."""
    shutil.copytree(model_folder, tmp_path / "tiny")
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "ab" * n} for n in range(4, 30)]))
    return tmp_path


RUN = """\
model: {model_name: tiny, max_seq_length: 128, dtype: float32}
data: {dataset: rows.json, sample_packing: true}
training: {max_steps: 3, gradient_accumulation_steps: 1, learning_rate: 1e-2, lr_scheduler_type: cosine}
"""


def command_line(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(CLI), *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def lines_of(folder, kind):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder):
    return [line["loss"] for line in lines_of(folder, "log") if "loss" in line]


def options(folder):
    return lines_of(folder, "config")[0]["options"]


# ---- files in other folders, from other systems


def test_a_chain_of_files_from_windows_in_other_folders(project, capsys):
    (project / "shared").mkdir()
    (project / "mine").mkdir()
    base = ("\ufeff" + RUN + "adapter: {r: 4, lora_alpha: 8}\n").replace("\n", "\r\n")
    (project / "shared" / "base.yaml").write_bytes(base.encode())
    (project / "mine" / "run.yaml").write_bytes(
        b"base_config: ../shared/base.yaml\r\nlora_alpha: null\r\nseed: 1\r\n"
    )
    flags = ["--config=mine/run.yaml", "--training.seed=2", "--output_dir=out"]
    assert main(flags) == 0
    ran = options("out")
    wanted = {"r": 4, "lora_alpha": 16.0, "seed": 2, "max_seq_length": 128, "learning_rate": 1e-2}
    assert {name: ran[name] for name in wanted} == wanted
    capsys.readouterr()
    assert main(["config", "show", *flags]) == 0
    assert "# mine/../shared/base.yaml:4" in capsys.readouterr().out


def test_all_that_is_wrong_is_said_before_anything_is_loaded(project):
    (project / "shared").mkdir()
    (project / "shared" / "base.yaml").write_bytes(b"\xef\xbb\xbfr: 4\r\nlearning_rat: 1\r\n")
    (project / "run.yaml").write_text(
        "base_config: shared/base.yaml\nmodel_name: no/such\ntuner: {train_type: lora}\nhub_token: hf_x\n"
    )
    before = sorted(project.rglob("*"))
    done = command_line(f"--config={project / 'run.yaml'}", cwd="/")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.replace(f"{project}/", "").splitlines() == [
        "run.yaml:3: tuner.train_type is unknown; did you mean tuning?",
        "run.yaml:4: hub_token is unknown; no token is read from here; set HF_TOKEN in the environment",
        "shared/base.yaml:2: learning_rat is unknown; did you mean learning_rate?",
    ]
    assert sorted(project.rglob("*")) == before


def test_a_pipe_is_no_file_to_wait_for(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    os.mkfifo(tmp_path / "base.yaml")
    (tmp_path / "other.yaml").write_text("base_config: base.yaml\n")
    whole = "unsloth-pack: config is 'run.yaml': no ordinary file; check the path"
    base = "other.yaml:1: base_config is 'base.yaml': no ordinary file; check the path from this"
    for name, line in (("run.yaml", whole), ("other.yaml", f"{base} file's folder")):
        done = command_line(f"--config={name}", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"{line}\n")


# ---- the file that a run writes


def test_the_file_of_a_run_repeats_it_bit_for_bit_from_anywhere(project, monkeypatch):
    """With other flags than the file's, and every one of its defaults."""
    (project / "run.yaml").write_text(RUN)
    flags = ["--r=4", "--lora_dropout=0.1", "--seed=11", "--loftq_config=null", "--save_model"]
    assert main(["--config=run.yaml", "--output_dir=out", *flags]) == 0
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert main(["--config=../out/config.yaml", "--output_dir=again"]) == 0
    out, again = project / "out", project / "elsewhere" / "again"
    assert losses(again) == losses(out)
    assert len(losses(out)) == 3
    same = options(out).keys() - {"output_dir", "save_path", "config", "model_name", "dataset"}
    assert {name: options(again)[name] for name in same} == {name: options(out)[name] for name in same}
    assert (again / "merged" / "config.json").is_file()  # not in the first run's folder
    name = "adapter_model.safetensors"
    assert (again / name).read_bytes() == (project / "out" / name).read_bytes()
    assert (again / "config.yaml").read_bytes() == (project / "out" / "config.yaml").read_bytes()


def test_the_file_of_a_second_stage_on_several_sets_repeats_it_from_elsewhere(project, monkeypatch):
    (project / "run.yaml").write_text(RUN)
    (project / "tokens.txt").write_text("<think>\n")
    assert main(["--config=run.yaml", "--output_dir=first"]) == 0
    sets = '[{"path": "rows.json", "weight": 2}, {"path": "more.json", "limit": 3}]'
    shutil.copy(project / "rows.json", project / "more.json")
    flags = [f"--dataset={sets}", "--init_adapter=first", "--merge_init_adapter", "--add_tokens=tokens.txt"]
    assert main(["--config=run.yaml", "--output_dir=out", *flags]) == 0
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert main(["--config=../out/config.yaml", "--output_dir=again"]) == 0
    assert losses("again") == losses(project / "out")


def test_a_run_is_resumed_with_or_without_its_file(project):
    (project / "run.yaml").write_text(RUN)
    assert main(["--config=run.yaml", "--output_dir=whole", "--save_steps=1"]) == 0
    for name in ("with", "without"):
        shutil.copytree("whole", name)
        kept = [
            line for line in Path(name, "metrics.jsonl").read_text().splitlines() if "summary" not in line
        ]
        Path(name, "metrics.jsonl").write_text("\n".join(kept) + "\n")
        shutil.rmtree(Path(name, "checkpoint-3"))
    before = Path("whole/config.yaml").read_bytes()
    assert main(["--resume", "--output_dir=without"]) == 0
    assert main(["--resume", "--output_dir=with", "--config=with/config.yaml", "--logging_steps=2"]) == 0
    weights = [Path(name, "adapter_model.safetensors").read_bytes() for name in ("whole", "with", "without")]
    assert weights[0] == weights[1] == weights[2]
    assert Path("with/config.yaml").read_bytes() == Path("without/config.yaml").read_bytes() == before


@pytest.mark.parametrize("more", [[], ["--overwrite_output_dir"]])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_config_of_the_user_is_never_replaced(kind, more, project, refused):
    """Not even the one that the run was started with."""
    (project / "mine.yaml").write_text(RUN)
    config = project / "out" / "config.yaml"
    config.parent.mkdir()
    if kind == "folder":
        config.mkdir()
    elif kind == "link":
        config.symlink_to(project / "mine.yaml")
    else:
        config.write_text(RUN)
    given = "mine.yaml" if kind == "folder" else "out/config.yaml"
    error = refused([f"--config={given}", "--output_dir=out", *more])
    assert "holds a config.yaml that no run wrote" in error if more else "holds config.yaml" in error
    assert kind == "folder" or config.read_text() == RUN
    assert os.listdir("out") == ["config.yaml"]


def test_a_run_replaces_the_file_of_an_earlier_one_when_asked(project):
    (project / "run.yaml").write_text(RUN)
    assert main(["--config=run.yaml", "--output_dir=out"]) == 0
    assert main(["--config=out/config.yaml", "--output_dir=out", "--overwrite_output_dir", "--seed=5"]) == 0
    assert "  seed: 5\n" in Path("out/config.yaml").read_text()


def test_resuming_a_run_of_an_earlier_version_leaves_a_config_of_the_user(project):
    (project / "run.yaml").write_text(RUN)
    assert main(["--config=run.yaml", "--output_dir=out"]) == 0
    for path in Path("out").iterdir():
        if path.name != "metrics.jsonl":
            path.unlink()
    first = Path("out/metrics.jsonl").read_text().splitlines()[0]
    Path("out/metrics.jsonl").write_text(f"{first}\n")
    Path("out/config.yaml").write_text("# mine\n")
    assert main(["--resume", "--output_dir=out"]) == 0
    assert Path("out/config.yaml").read_text() == "# mine\n"


# ---- recipes


DATA = str(Path(unsloth_pack.__file__).parent / "demo" / "data" / "train.jsonl")  # unscored, unlike `demo`
DEMO_WEIGHTS = Path(unsloth_pack.__file__).parent / "demo" / "model" / "model.safetensors"
QUICK = ["--max_steps=2", "--gradient_accumulation_steps=1", "--training.warmup_steps=0", "--logging_steps=1"]
QUICK_STAGE = ["--max_steps=2", "--effective_batch_size=1", "--logging_steps=1"]


@pytest.mark.nightly
def test_a_recipe_runs_as_it_is():
    """And scores the demo before and after, which takes long."""
    assert main(["recipe", "copy", "sft-packed"]) == 0
    assert main(["--config=sft-packed.yaml", *QUICK]) == 0
    assert len(losses("outputs/sft-packed")) == 2
    assert lines_of("outputs/sft-packed", "demo")


@pytest.mark.parametrize(
    ("name", "quick"), [("sft-packed", QUICK), ("qlora", QUICK), ("stages", QUICK_STAGE)]
)
def test_a_recipe_runs_on_the_demo(name, quick):
    assert main(["recipe", "copy", name, "recipes"]) == 0
    assert main([f"--config=recipes/{name}.yaml", "--output_dir=out", f"--dataset={DATA}", *quick]) == 0
    assert len(losses("out")) == 2
    assert Path("out/adapter_model.safetensors").is_file()
    assert options("out")["load_in_4bit"] is (name == "qlora")
    if name == "sft-packed":
        assert main(["--config=out/config.yaml", "--output_dir=again"]) == 0
        assert losses("again") == losses("out")


def test_two_stages_run_one_after_the_other_on_the_demo():
    for stage in ("stage1", "stage2"):
        assert main(["recipe", "copy", stage]) == 0
        assert main([f"--config={stage}.yaml", f"--dataset={DATA}", *QUICK_STAGE]) == 0
    first, second = options("outputs/stage1"), options("outputs/stage2")
    assert (first["r"], second["r"]) == (16, 32)
    assert second["init_adapter"] == "outputs/stage1"
    assert Path("outputs/stage2/adapter_model.safetensors").is_file()
    base = json.loads(Path("outputs/stage2/adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(Path("outputs/stage2/base").absolute())  # from any folder
    merged = load_file("outputs/stage2/base/model.safetensors")
    assert any(not torch.equal(weight, merged[name]) for name, weight in load_file(DEMO_WEIGHTS).items())
    trained = load_file("outputs/stage2/adapter_model.safetensors")
    assert "base_model.model.model.norm.weight" in trained
    assert not any(".layers.0." in name for name in trained)
    assert any(".layers.1." in name for name in trained)


def test_the_full_recipe_saves_a_model_that_transformers_loads():
    assert main(["recipe", "copy", "full"]) == 0
    assert main(["--config=full.yaml", f"--dataset={DATA}", *QUICK]) == 0
    assert len(losses("outputs/full")) == 2
    assert not Path("outputs/full/adapter_config.json").exists()
    _, unknown = AutoModelForCausalLM.from_pretrained("outputs/full", output_loading_info=True)
    assert not any(unknown.values())
    trained, before = load_file("outputs/full/model.safetensors"), load_file(DEMO_WEIGHTS)
    assert all(not torch.equal(weight, before[name]) for name, weight in trained.items())
