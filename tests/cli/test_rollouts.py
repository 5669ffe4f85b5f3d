"""`train --objective rollouts`: targets that a function makes of what the model generates."""

import pytest
from cli_runs import read_metrics
from killed_runs import ended, kill_while_saving, rows_of_steps, start
from safetensors.torch import load_file

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

def failing(rollout):
    return rollout.row["nothing"]

def nothing(rollout):
    return None

number = 3
'''
FLAGS = {"objective": "rollouts", "rollout_function": "functions.py:repeat", "max_new_tokens": 8}
FLAGS |= {"max_steps": 7, "gradient_accumulation_steps": 2, "num_generations": 2, "lora_dropout": 0.2}
FLAGS |= {"max_seq_length": 192, "generation_batch_size": 6}


@pytest.fixture(autouse=True)
def functions(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)


def of_log(folder, name):
    return {line["step"]: line[name] for line in read_metrics(folder)["log"] if name in line}


def documents(rows):
    """The documents of packed rows, as they were trained on."""
    return [tuple(row) for rows_of_step in rows.values() for row in rows_of_step]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model, data):
    """A run that nothing interrupts: more than a pass over the prompts, in several rows an update."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "functions.py").write_text(FUNCTIONS)
    flags = FLAGS | {"model_name": model, "dataset": data, "save_steps": 2, "dtype": "float32"}
    flags |= {"learning_rate": 0.01, "rollout_function": f"{folder}/functions.py:repeat"}
    flags = [f"--{name}={value}" for name, value in flags.items()]
    assert ended(start([*flags, f"--output_dir={folder / 'out'}"], folder)) == 0, (
        folder / "stderr"
    ).read_text()
    return folder, flags


@pytest.mark.parametrize("step", [4, 6])
def test_a_killed_run_trains_on_the_targets_of_one_that_was_not(step, whole, tmp_path):
    """None lost, none twice, to the bit; with the targets that waited."""
    folder, flags = whole
    out = tmp_path / "out"
    assert kill_while_saving(start([*flags, f"--output_dir={out}"], tmp_path), out, step, 0.01)
    assert list(out.glob("checkpoint-*"))
    assert ended(start(["--resume", f"--output_dir={out}"], tmp_path)) == 0, (tmp_path / "stderr").read_text()
    assert rows_of_steps(tmp_path) == rows_of_steps(folder)
    for name in ("loss", "rollouts/characters", "rollouts/dropped"):
        assert of_log(out, name) == of_log(folder / "out", name)
    ours, theirs = (load_file(path / "out" / "adapter_model.safetensors") for path in (tmp_path, folder))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
