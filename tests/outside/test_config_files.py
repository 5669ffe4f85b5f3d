"""Config files as their users have them: in other folders, on other systems, from a run, from a recipe."""

import json
import os
import shutil
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


def lines_of(folder, kind):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder):
    return [line["loss"] for line in lines_of(folder, "log") if "loss" in line]


def options(folder):
    return lines_of(folder, "config")[0]["options"]


# ---- files in other folders, from other systems


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


# ---- recipes


DATA = str(Path(unsloth_pack.__file__).parent / "demo" / "data" / "train.jsonl")  # unscored, unlike `demo`
DEMO_WEIGHTS = Path(unsloth_pack.__file__).parent / "demo" / "model" / "model.safetensors"
QUICK = ["--max_steps=2", "--gradient_accumulation_steps=1", "--training.warmup_steps=0", "--logging_steps=1"]
QUICK_STAGE = ["--max_steps=2", "--effective_batch_size=1", "--logging_steps=1"]


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


def test_an_anchored_recipe_learns_and_stays_near_its_base():
    lines = []
    assert main(["recipe", "copy", "distill-anchor"]) == 0
    for kl_weight in (0, 5):
        flags = [f"--output_dir=out{kl_weight}", f"--kl_weight={kl_weight}", "--eval_fraction=0.02"]
        flags += ["--eval_steps=4", "--learning_rate=1e-3", f"--dataset={DATA}", *QUICK, "--max_steps=8"]
        assert main(["--config=distill-anchor.yaml", *flags]) == 0
        metrics = [
            json.loads(line) for line in Path(f"out{kl_weight}/metrics.jsonl").read_text().splitlines()
        ]
        assert next(line["kl_loss"] for line in metrics if "kl_loss" in line) == 0
        lines.append([line for line in metrics if "eval_kl_loss" in line])
    free, anchored = lines
    assert 0 < anchored[-1]["eval_kl_loss"] < free[-1]["eval_kl_loss"] / 2
    for line in lines:
        assert line[-1]["eval_sft_loss"] < line[0]["eval_sft_loss"]


@pytest.mark.parametrize(("name", "better"), [("dpo", "rewards/accuracies"), ("kto", "rewards/margins")])
def test_a_recipe_of_preferences_learns_them(name, better):
    data = {"dpo": "demo-preferences", "kto": "demo-feedback"}[name]
    assert main(["recipe", "copy", name]) == 0
    flags = [f"--eval_dataset={data}", "--eval_steps=8", "--sample_limit=64", "--learning_rate=2e-3", *QUICK]
    assert main([f"--config={name}.yaml", "--output_dir=out", *flags, "--max_steps=8"]) == 0
    metrics = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    (first, *_), (last, *_) = (
        [line for line in metrics if key in line] for key in ("loss", f"eval_{better}")
    )
    assert {value for key, value in first.items() if key.startswith("rewards/")} == {0}
    assert last[f"eval_{better}"] > (0.6 if name == "dpo" else 0.1)


def test_the_full_recipe_saves_a_model_that_transformers_loads():
    assert main(["recipe", "copy", "full"]) == 0
    assert main(["--config=full.yaml", f"--dataset={DATA}", *QUICK]) == 0
    assert len(losses("outputs/full")) == 2
    assert not Path("outputs/full/adapter_config.json").exists()
    _, unknown = AutoModelForCausalLM.from_pretrained("outputs/full", output_loading_info=True)
    assert not any(unknown.values())
    trained, before = load_file("outputs/full/model.safetensors"), load_file(DEMO_WEIGHTS)
    assert all(not torch.equal(weight, before[name]) for name, weight in trained.items())
