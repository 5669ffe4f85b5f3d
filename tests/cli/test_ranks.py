"""Several processes: the same update as one process that sees the same rows."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_runs import cut_after, losses, read_metrics
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerControl
from warm import ROOT, SECONDS, torchrun

from unsloth_pack.cli import main
from unsloth_pack.report.callbacks import StopOnSignal

CUT = {"max_seq_length": 128, "max_token_loss": 1}
SIX_UPDATES = CUT | {"max_steps": 6, "learning_rate": 0.01, "logging_steps": 1}


def assert_same_adapter(folder, other):
    adapters = [load_file(path / "adapter_model.safetensors") for path in (folder, other)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, weight in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], weight, msg=name)


def assert_same_evaluations(folder, other):
    lines = [line for path in (folder, other) for line in read_metrics(path)["log"] if "eval_loss" in line]
    seen = torch.tensor([[line["eval_loss"], line.get("eval_sample_loss", 0)] for line in lines])
    torch.testing.assert_close(*seen.chunk(2))


def assert_same_run(folder, other):
    one, two = losses(folder), losses(other)
    assert one.keys() == two.keys()
    torch.testing.assert_close(torch.tensor([*two.values()]), torch.tensor([*one.values()]))
    assert_same_adapter(folder, other)
    counts = [read_metrics(path)["summary"][0]["tokens_trained"] for path in (folder, other)]
    assert counts[0] == counts[1]


def test_two_processes_of_torchrun_make_the_update_of_one(train, model, data, rows, tmp_path):
    """So does one process that goes on where the two stopped."""
    few = tmp_path / "few.json"
    few.write_text(json.dumps(rows[:8]))
    flags = SIX_UPDATES | {"eval_dataset": few, "per_device_eval_batch_size": 4}  # no whole batch for each
    flags |= {"save_steps": 4}
    done = torchrun(
        *(2, "--sample_packing"),
        **flags | {"model_name": model, "dataset": data, "output_dir": tmp_path / "two"},
        gradient_accumulation_steps=2,
        real=True,
    )
    assert done.returncode == 0, done.stderr
    assert "estimated spread between ranks" in done.stdout
    assert train("--sample_packing", **flags, gradient_accumulation_steps=4) == 0

    assert_same_run(tmp_path / "out", tmp_path / "two")
    assert_same_evaluations(tmp_path / "out", tmp_path / "two")
    cut_after(tmp_path / "two", 4)
    assert main(["--resume", f"--output_dir={tmp_path / 'two'}"]) == 0
    assert_same_run(tmp_path / "out", tmp_path / "two")


def test_a_run_goes_on_with_another_number_of_processes(train, tmp_path, monkeypatch, capsys):
    flags = SIX_UPDATES | {"gradient_accumulation_steps": 4, "save_steps": 2}
    assert train("--sample_packing", **flags) == 0
    whole, moved = tmp_path / "out", tmp_path / "moved"
    shutil.copytree(whole, moved)
    cut_after(moved, 4)
    with monkeypatch.context() as patched:
        patched.setattr("unsloth_pack.run.folder.count_processes", lambda: 3)
        assert main(["--resume", f"--output_dir={moved}"]) == 2
    assert "this one has 3, but an update has 4 rows; continue with 1" in capsys.readouterr().err
    again = torchrun(2, "--resume", output_dir=moved, gradient_accumulation_steps=4)
    assert again.returncode == 0, again.stderr
    assert_same_run(whole, moved)


def test_all_of_a_model_trains_on_two_processes(train, model, data, tmp_path):
    """As on one; resumed too. A part that is frozen has no gradient in either."""
    flags = SIX_UPDATES | {"tuning": "full", "freeze_modules": "layers.0", "learning_rate": 1e-3}
    two = flags | {"dataset": data, "model_name": model, "output_dir": tmp_path / "two", "save_steps": 3}
    done = torchrun(2, "--sample_packing", **two, gradient_accumulation_steps=2)
    assert done.returncode == 0, done.stderr
    assert train("--sample_packing", **flags, gradient_accumulation_steps=4) == 0
    one, of_two = (losses(tmp_path / name) for name in ("out", "two"))
    torch.testing.assert_close(torch.tensor([*of_two.values()]), torch.tensor([*one.values()]))
    ends = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "two")]
    torch.testing.assert_close(ends[1], ends[0])
    began = load_file(Path(model) / "model.safetensors")
    moved = {name for name, weight in began.items() if not torch.equal(weight, ends[1][name])}
    assert moved == {name for name in began if ".layers.0." not in name}
    cut_after(tmp_path / "two", 3)
    again = torchrun(2, "--resume", output_dir=tmp_path / "two")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "two") == of_two
    resumed = load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in ends[1].items())


def test_a_process_that_is_killed_ends_the_run_with_the_way_on(model, data, tmp_path):
    flags = {"model_name": model, "dataset": data, "output_dir": tmp_path / "out"}
    flags |= CUT | {"max_steps": 6, "save_steps": 2}
    program = Path(__file__).with_name("killed_rank.py")
    done = torchrun(2, "--sample_packing", program=program, **flags)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("unsloth-pack: ")]
    assert said == [
        "unsloth-pack: another process of this run has ended; checkpoint-2 is whole, go on with: "
        f"torchrun --nproc_per_node 2 cli.py --resume --output_dir {tmp_path / 'out'}"
    ]


def test_a_signal_to_one_process_stops_all_at_the_same_update(model, data, tmp_path):
    out, error_file = tmp_path / "out", tmp_path / "error.json"
    flags = (
        {"model_name": model, "dataset": data, "output_dir": out}
        | CUT
        | {"max_steps": 40, "gradient_accumulation_steps": 1}
    )
    program = Path(__file__).with_name("stopped_rank.py")
    done = torchrun(2, "--sample_packing", program=program, error_file=error_file, **flags)
    assert done.returncode == 1
    assert json.loads(error_file.read_text())["message"]["errorCode"] == 143
    (stopped,) = read_metrics(out)["stopped"]
    assert (stopped["step"], stopped["signal"]) == (5, "SIGTERM")  # asked for after the fourth
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-5"]
    assert len(list((out / "checkpoint-5").glob("rng_state_*.pth"))) == 2


class Work:
    """A reduction that ends when somebody waits for it; then the numbers of the others have come in."""

    def __init__(self, tensor, others):
        self.tensor, self.others, self.waited = tensor, others, False

    def wait(self):
        self.waited = True
        self.tensor.clamp_(min=self.others)


def test_no_step_waits_for_what_it_asks_the_other_processes(monkeypatch):
    works, others = [], iter([0, signal.SIGTERM, 0])

    def all_reduce(tensor, operation, async_op=False):
        assert async_op
        works.append(Work(tensor, next(others)))
        return works[-1]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    stop, control = StopOnSignal(), TrainerControl()
    arguments = SimpleNamespace(device=torch.device("cpu"))
    for asked in (1, 2, 3):
        assert not control.should_training_stop
        stop.on_step_end(arguments, None, control)
        assert [work.waited for work in works] == [True] * (asked - 1) + [False]
    assert control.should_training_stop
    assert control.should_save
    assert stop.received is signal.SIGTERM
    stop.on_train_end(arguments, None, control)
    assert works[-1].waited  # nothing is left for the end of the process


def test_torchrun_hands_the_exit_code_on(tmp_path):
    """In the file that its environment names, as docs/ranks.md says; its own exit code is always 1.

    Of one process: torchrun would end another, and of failures in one second it may name either.
    """
    error_file = tmp_path / "error.json"
    done = torchrun(1, error_file=error_file, real=True, max_steps=0)
    assert done.returncode == 1
    told = json.loads(error_file.read_text())["message"]
    assert told["errorCode"] == 2
    assert told["message"].startswith("unsloth-pack: max_steps is '0'; ")
    assert f"traceback : {told['message']}" in done.stderr


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--fsdp", "14 layers; those over one input"),
        pytest.param("--deepspeed=zero2", "14 layers; those over one input", marks=pytest.mark.extras),
        pytest.param("--deepspeed=zero3", "14 layers: ZeRO-3 gathers the weights", marks=pytest.mark.extras),
    ],
)
def test_sharded_weights_make_the_update_of_one_process(flag, says, train, model, data, rows, tmp_path):
    few = tmp_path / "few.json"
    few.write_text(json.dumps(rows[:7]))
    flags = SIX_UPDATES | {
        "eval_dataset": few,
        "eval_packing": False,
    }  # a row alone with one of the processes
    sharded = {"model_name": model, "dataset": data, "gradient_accumulation_steps": 2, **flags}
    named = (f"--{name}={value}" for name, value in sharded.items())
    sharded = ["--sample_packing", "--verbose", flag, *named]
    whole, two, resumed, recomputed = (tmp_path / name for name in ("out", "two", "resumed", "recomputed"))
    runs = {
        str(two): [*sharded, "--save_steps=4", "--save_model"],
        str(resumed): ["--resume"],
        str(recomputed): [*sharded, "--use_gradient_checkpointing=true"],
    }
    program = Path(__file__).with_name("sharded_runs.py")
    done = torchrun(2, json.dumps(runs), program=program)
    assert done.returncode == 0, done.stderr
    for ended in ("LEFT", "SAVED"):
        assert set(re.findall(f"{ended} (.*)", done.stdout)) == {"True"}
    assert says in " ".join(done.stdout.replace("│", "").split())
    shards = [json.loads(found) for found in re.findall("SHARDS ({.*?})", done.stdout)]
    assert len(shards) >= 2 * len(runs)  # at each end, and at every save
    for of_rank in shards if flag == "--fsdp" else []:
        assert of_rank["read from peers"] == of_rank["layers"]
        assert of_rank["held"] < 0.6 * of_rank["parameters"]
    assert train("--sample_packing", "--save_model", **flags, gradient_accumulation_steps=4) == 0

    losses_of_one = losses(whole)
    for folder in (two, resumed, recomputed):
        assert losses(folder).keys() == losses_of_one.keys()
        of_two = torch.tensor([*losses(folder).values()])
        torch.testing.assert_close(of_two, torch.tensor([*losses_of_one.values()]))
        assert_same_evaluations(whole, folder)
        assert_same_adapter(whole, folder)
    merged = [load_file(folder / "merged" / "model.safetensors") for folder in (whole, two)]
    assert merged[0].keys() == merged[1].keys()
    assert read_metrics(resumed)["log"][0] == read_metrics(two)["log"][0]  # of the run that it goes on with
    AutoPeftModelForCausalLM.from_pretrained(resumed)


def test_a_base_in_four_bits_trains_in_parts_as_under_ddp(model, data, tmp_path):
    """To the bit; also where layers stay gathered after an evaluation, and one process saves."""
    flags = SIX_UPDATES | {"model_name": model, "dataset": data, "eval_dataset": data, "save_steps": 4}
    flags = ["--sample_packing", "--load_in_4bit", *(f"--{name}={value}" for name, value in flags.items())]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = {str(whole): flags, str(parts): [*flags, "--fsdp=keep", "--verbose", "--machines=2"]}
    done = torchrun(2, json.dumps(runs), program=Path(__file__).with_name("sharded_runs.py"))
    assert done.returncode == 0, done.stderr
    assert '"gathered by FSDP2": 2' in done.stdout
    assert "CUDA graphs: FSDP2 shards the parameters" in " ".join(done.stdout.replace("│", "").split())
    assert losses(parts) == losses(whole)
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in (whole, parts)]
    assert all(torch.equal(adapters[1][name], weight) for name, weight in adapters[0].items())


def test_objectives_train_on_layers_in_parts_as_in_one_process(train, model, data, rows, tmp_path):
    """With evaluations; with passes of the base model, and over layers that stay gathered after these."""
    pairs = [{"prompt": r["instruction"], "chosen": r["output"], "rejected": "yz" * 8} for r in rows]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    classes = [{"text": r["output"], "label": r["output"][0]} for r in rows]
    (tmp_path / "classes.json").write_text(json.dumps(classes))
    flags = SIX_UPDATES | {"max_steps": 3, "eval_steps": 2, "model_name": model, "dtype": "float32"}
    cases = {  # data, and options
        "distill": (data, {"objective": "distill", "fsdp": "keep"}),
        "dpo": (tmp_path / "pairs.json", {"objective": "dpo", "fsdp": "full"}),
        "orpo": (tmp_path / "pairs.json", {"objective": "orpo", "fsdp": "full"}),
        "classify": (tmp_path / "classes.json", {"task": "classify", "fsdp": "full"}),
    }
    runs = {}
    for name, (rows, options) in cases.items():
        own = flags | options | {"dataset": rows, "eval_dataset": rows, "gradient_accumulation_steps": 2}
        runs[str(tmp_path / name)] = ["--sample_packing", *(f"--{k}={v}" for k, v in own.items())]
    runs[str(tmp_path / "distill")].append("--machines=2")
    done = torchrun(2, json.dumps(runs), program=Path(__file__).with_name("sharded_runs.py"))
    assert done.returncode == 0, done.stderr
    for name, (rows, options) in cases.items():
        own = flags | options | {"dataset": rows, "eval_dataset": rows, "gradient_accumulation_steps": 4}
        whole = tmp_path / f"{name}-whole"
        assert train("--sample_packing", **own | {"fsdp": None, "output_dir": whole}) == 0
        assert_same_run(whole, tmp_path / name)
        assert_same_evaluations(whole, tmp_path / name)


@pytest.mark.nightly
def test_two_machines(model, data, tmp_path):
    """Two agents of torchrun that know each other's address, as docs/ranks.md starts them."""
    flags = SIX_UPDATES | {"model_name": model, "dataset": data, "output_dir": tmp_path / "out"}
    flags = ["--fsdp", "--sample_packing", *(f"--{name}={value}" for name, value in flags.items())]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meets = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meets]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    program = [str(ROOT / "cli.py"), *flags]
    agents = [
        subprocess.Popen([*command, f"--node_rank={rank}", *program], env=environment) for rank in (0, 1)
    ]
    assert [agent.wait(SECONDS) for agent in agents] == [0, 0]
    assert len(losses(tmp_path / "out")) == 6


def test_a_process_with_other_files_trains_with_no_other(model, data, rows, tmp_path):
    """One line in each before the training, and bad input as the exit code; nothing is written."""
    base = AutoModelForCausalLM.from_pretrained(model)
    folders = {name: tmp_path / name for name in ("whole", "nan", "other", "cut", "lacking")}
    for name, folder in folders.items():
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        if name == "nan":
            base.model.layers[0].mlp.up_proj.weight.data[-1] = torch.nan  # of the rows of rank 1
        if name == "other":
            base = AutoModelForCausalLM.from_pretrained(model)
            base.model.norm.weight.data.fill_(2)
        base.save_pretrained(folder, max_shard_size="100KB")
    cut, lacking = (sorted(folders[name].glob("*.safetensors"))[1] for name in ("cut", "lacking"))
    cut.write_bytes(cut.read_bytes()[:-1])
    lacking.unlink()
    turned = tmp_path / "turned.json"
    turned.write_text(json.dumps(rows[::-1]))
    is_other = "on rank 1 is not that of rank 0: its {} differs"
    cases = [  # models of both, the data of rank 1, and what each says
        ("whole", "other", data, is_other.format(r"model-\S+")),
        ("whole", "cut", data, is_other.format(lacking.name)),
        ("whole", "lacking", data, is_other.format(lacking.name)),
        ("whole", "away", data, "away: no such folder"),
        ("whole", "whole", turned, is_other.format("fingerprint")),
        ("nan", "nan", data, "weight .*layers.0.mlp.up_proj.weight is not finite"),
        ("lacking", "lacking", data, f"lacking.*{lacking.name}"),
    ]
    flags = ["--fsdp", "--sample_packing", f"--output_dir={tmp_path / 'out'}", "--max_token_loss=1"]
    flags += ["--max_seq_length=128"]
    runs = [
        [[*flags, f"--model_name={tmp_path / folder}", f"--dataset={rows}"] for folder, rows in of_rank]
        for of_rank in ([(one, data) for one, *_ in cases], [(other, rows) for _, other, rows, _ in cases])
    ]
    done = torchrun(2, *map(json.dumps, runs), program=Path(__file__).with_name("refused_ranks.py"))
    assert done.returncode == 0, done.stderr
    lines = re.findall("unsloth-pack: .*", done.stderr)
    for number, (*_, says) in enumerate(cases):
        pair = lines[2 * number : 2 * number + 2]
        assert [bool(re.search(says, line)) for line in pair] == [True, True], (says, pair)
    assert len(lines) == 2 * len(cases)
    assert not (tmp_path / "out").exists()
