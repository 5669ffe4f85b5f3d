"""`train --objective rollouts`: targets that a function makes of what the model generates."""

import json
from pathlib import Path

import pytest
import torch
from cli_runs import read_metrics
from killed_runs import ended, kill_while_saving, rows_of_steps, start
from safetensors.torch import load_file
from tables import table
from warm import torchrun

import unsloth_pack
from unsloth_pack.cli import main

DEMO = Path(unsloth_pack.__file__).parent / "demo" / "data" / "train.jsonl"

FUNCTIONS = '''
def repeat(rollout):
    """What was generated, then the expected answer; every third is dropped."""
    rollout.counters["characters"] += len(rollout.text)
    if sum(rollout.ids) % 3 == 0:
        return None
    wanted = rollout.tokenizer.encode(rollout.row["output"][:12], add_special_tokens=False)
    ids = rollout.ids[:4] + wanted + [rollout.tokenizer.eos_token_id]
    return ids, [0.5] * len(rollout.ids[:4]) + [1.0] * (len(ids) - len(rollout.ids[:4]))

def text(rollout):
    return rollout.text

def weights(rollout):
    return rollout.ids, [1.0] * (len(rollout.ids) + 1)

def outside(rollout):
    return [10**6]

def below(rollout):
    return [-1]

def counting(rollout):
    rollout.counters["said"] = rollout.text

def pair(rollout, more):
    return None

def long(rollout):
    return [5] * 200

def failing(rollout):
    return rollout.row["nothing"]

def nothing(rollout):
    return None

number = 3
'''
FLAGS = {"objective": "rollouts", "rollout_function": "functions.py:repeat", "max_new_tokens": 8}
FLAGS |= {"max_steps": 7, "gradient_accumulation_steps": 2, "num_generations": 2, "lora_dropout": 0.2}
FLAGS |= {"max_seq_length": 192, "generation_batch_size": 6}
DEFAULTS = dict.fromkeys(("max_new_tokens", "num_generations", "generation_batch_size"))


@pytest.fixture(autouse=True)
def functions(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)


def of_log(folder, name):
    return {line["step"]: line[name] for line in read_metrics(folder)["log"] if name in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model, data):
    """A run that nothing interrupts: more than a pass over the prompts, in several rows an update."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "functions.py").write_text(FUNCTIONS)
    flags = FLAGS | {
        "model_name": model,
        "dataset": data,
        "save_steps": 2,
        "eval_dataset": data,
        "eval_steps": 3,
        "dtype": "float32",
    }
    flags |= {"learning_rate": 0.01, "rollout_function": f"{folder}/functions.py:repeat"}
    flags = [f"--{name}={value}" for name, value in flags.items()]
    assert ended(start([*flags, f"--output_dir={folder / 'out'}"], folder)) == 0, (
        folder / "stderr"
    ).read_text()
    return folder, flags


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise on a CPU")
@pytest.mark.parametrize("step", [4, 6])
def test_a_killed_run_trains_on_the_targets_of_one_that_was_not(step, whole, tmp_path):
    """None lost, none twice, to the bit; with the targets that waited."""
    folder, flags = whole
    out = tmp_path / "out"
    assert kill_while_saving(start([*flags, f"--output_dir={out}"], tmp_path), out, step, 0.01)
    assert list(out.glob("checkpoint-*"))
    assert ended(start(["--resume", f"--output_dir={out}"], tmp_path)) == 0, (tmp_path / "stderr").read_text()
    assert rows_of_steps(tmp_path) == rows_of_steps(folder)
    for name in ("loss", "eval_loss", "rollouts/characters", "rollouts/dropped"):
        assert of_log(out, name) == of_log(folder / "out", name)
    ours, theirs = (load_file(path / "out" / "adapter_model.safetensors") for path in (tmp_path, folder))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_two_processes_share_the_prompts_and_log_together(model, data, tmp_path):
    flags = FLAGS | {"model_name": model, "dataset": data, "output_dir": tmp_path / "out", "max_steps": 3}
    flags |= {"rollout_function": tmp_path / "functions.py:repeat", "dtype": "float32"}
    done = torchrun(2, **flags)
    assert done.returncode == 0, done.stderr
    assert len(of_log(tmp_path / "out", "rollouts/characters")) >= 2
    summary = read_metrics(tmp_path / "out")["summary"][0]
    assert summary["stream"]["fill"]["rows"] == 3 * 2 * 2


def test_a_function_that_fails_later_stops_the_run_with_a_checkpoint(train, tmp_path, capsys):
    """And once it is corrected, the run goes on as if it had always been so."""
    file, whole, cut = tmp_path / "functions.py", tmp_path / "whole", tmp_path / "cut"
    assert train(**FLAGS, output_dir=whole) == 0
    once = "    if rollout.row['output'] == LATE: raise KeyError('late')\n"
    late = json.dumps(json.loads(Path(whole_data(whole)).read_text())[30]["output"])
    file.write_text(f"LATE = {late}\n" + FUNCTIONS.replace("    wanted =", once + "    wanted =", 1))
    assert train(**FLAGS, output_dir=cut) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "functions.py:repeat failed in line" in said
    assert "is whole, go on with: unsloth-pack --resume" in said
    file.write_text(FUNCTIONS)
    assert main(["--resume", f"--output_dir={cut}"]) == 0
    assert of_log(cut, "loss") == of_log(whole, "loss")


def whole_data(folder):
    return read_metrics(folder)["config"][0]["options"]["dataset"]


@table("flags, said", [
    (DEFAULTS | {"objective": "sft"}, "rollout_function is 'functions.py:repeat' and objective is 'sft'"),
    ({"rollout_function": None}, "objective is 'rollouts', which needs another option; give --rollout"),
    ({"rollout_function": "none.py:repeat"}, "'none.py:repeat' cannot be imported (FileNotFoundError"),
    ({"rollout_function": "functions.py:absent"}, "functions.py has no function absent; correct it"),
    ({"rollout_function": "functions.py:number"}, "functions.py has no function number; correct it"),
    ({"rollout_function": "functions.py"}, "rollout_function is 'functions.py'; give FILE.py:NAME"),
    ({"max_new_tokens": 192}, "max_new_tokens is 192 and max_seq_length is 192, which leaves no room"),
    ({"rollout_temperature": 0}, "num_generations is 2 and rollout_temperature is 0.0, and so all equal"),
    ({"dataset": "empty.json"}, "row 1, column 'prompt': nothing to answer, got ''; remove the row"),
    ({"dataset": "texts.json"}, "texts.json: rows of the format text have no prompt; give a column prompt"),
])  # fmt: skip
def test_what_cannot_be_generated_is_refused(flags, said, refused, tmp_path):
    (tmp_path / "texts.json").write_text(json.dumps([{"text": "ab"}] * 3))
    (tmp_path / "empty.json").write_text(json.dumps([{"prompt": "ab"}, {"prompt": ""}]))
    assert said in refused(**FLAGS | flags)


@table("function, said", [
    ("text", "returned str; return token ids, (ids, weights), a number for each, or None"),
    ("weights", "returned tuple; return token ids, (ids, weights), a number for each, or None"),
    ("outside", "returned an id outside of 0 to "),
    ("below", "returned an id outside of 0 to "),
    ("counting", "functions.py:counting failed: ValueError: could not convert string to float"),
    ("pair", "functions.py:pair failed: TypeError: pair() missing 1 required positional argument"),
    ("failing", "failed in line "),
    ("nothing", "made no target of 40 prompts, and 0 prompts or targets were too long; correct it, or"),
    ("long", "made no target of 40 prompts, and 80 prompts or targets were too long; correct it, or"),
])  # fmt: skip
def test_a_function_that_returns_something_else_trains_nothing(function, said, train, tmp_path, capsys):
    assert train(**FLAGS | {"rollout_function": f"functions.py:{function}"}) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error
    assert "log" not in read_metrics(tmp_path / "out")


def test_the_reward_of_the_recipe_rises(tmp_path):
    """On the demo: from a first guess to answers that are mostly right."""
    rows = [json.loads(line) for line in DEMO.read_text().splitlines()]
    short = [row for row in rows if " - " in row["output"] and len(row["input"].split()) < 12]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    flags = ["--dataset=short.jsonl", "--max_steps=32", "--max_new_tokens=24", "--output_dir=out"]
    assert main(["recipe", "copy", "rollouts"]) == 0
    assert main(["--config=rollouts.yaml", *flags]) == 0
    reward = [*of_log(tmp_path / "out", "rollouts/reward").values()]
    assert sum(reward[:5]) / 5 < 0.2
    assert sum(reward[-5:]) / 5 > 0.4
