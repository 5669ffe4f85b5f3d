"""A run that is killed at any moment and resumed has the losses, rows and weights of an uninterrupted one."""

import json
import os
import random
import resource
import shutil
import signal
import time

import psutil
import pytest
import torch
from cli_runs import losses, read_metrics
from killed_runs import (
    die_before_the_adapter_is_saved,
    ended,
    fill_the_disk_at_the_second_save,
    kill_after,
    kill_while_saving,
    leave_the_output_unread,
    rows_of_steps,
    show_ascii_alone,
    start,
    wait_for,
)
from safetensors.torch import load_file

import unsloth_pack.cli.train
from unsloth_pack.cli import main
from unsloth_pack.report.metrics import has_ended
from unsloth_pack.training.checkpoints import last_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise on a CPU")

STEPS, EVERY = 9, 2  # updates, and updates between checkpoints


@pytest.fixture(scope="module")
def flags(model, data):
    """More than an epoch of packed rows, with dropout: random states must go on where they were."""
    given = {"model_name": model, "dataset": data, "max_seq_length": 256, "max_steps": STEPS, "r": 4}
    given |= {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "lora_dropout": 0.2}
    given |= {"save_steps": EVERY, "warmup_steps": 1, "optim": "adamw_torch_fused"}  # as on CUDA
    return ["--sample_packing", *(f"--{name}={value}" for name, value in given.items())]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The folder of a run that nothing interrupts, and the seconds that it takes."""
    folder = tmp_path_factory.mktemp("whole")
    start(["--help"], folder / "warm").join()  # starts the process that all are forked from
    began = time.monotonic()
    assert ended(start([*flags, f"--output_dir={folder / 'out'}"], folder)) == 0
    return folder, time.monotonic() - began


def go_on(flags, folder):
    """Resume the run, unless it was killed after its end; start it where it was killed before it began."""
    out = folder / "out"
    begun = (out / "metrics.jsonl").exists()
    if begun and has_ended(out):
        return
    command = ["--resume", f"--output_dir={out}"] if begun else [*flags, f"--output_dir={out}"]
    assert ended(start(command, folder)) == 0, (folder / "stderr").read_text()


def assert_same_run(folder, whole):
    assert losses(folder / "out") == losses(whole / "out")
    assert list(losses(folder / "out")) == list(range(1, STEPS + 1))
    assert rows_of_steps(folder) == rows_of_steps(whole)
    ours, theirs = (load_file(path / "out" / "adapter_model.safetensors") for path in (folder, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    ours, theirs = (read_metrics(path / "out") for path in (folder, whole))
    assert ours["data"] == theirs["data"]
    assert [line["num_tokens"] for line in ours["log"] if "loss" in line] == [
        line["num_tokens"] for line in theirs["log"] if "loss" in line
    ]
    assert {path.name for path in (folder / "out").iterdir()} == {
        path.name for path in (whole / "out").iterdir()
    }


def killed(moment, flags, folder, whole_seconds, rng):
    """Start a run and kill it: at a random moment, or during a save. Returns whether it was still alive."""
    run = start([*flags, f"--output_dir={folder / 'out'}"], folder)
    if moment == "anywhere":
        return kill_after(run, rng.uniform(0, whole_seconds))
    step = rng.choice(range(EVERY, STEPS, EVERY))
    return kill_while_saving(run, folder / "out", step, rng.uniform(0, 0.02))


@pytest.mark.parametrize("moment", ["anywhere", "saving"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(moment, flags, whole, tmp_path):
    rng = random.Random()
    killed(moment, flags, tmp_path, whole[1], rng)
    go_on(flags, tmp_path)
    assert_same_run(tmp_path, whole[0])


@pytest.mark.nightly
def test_twenty_random_moments(flags, whole, tmp_path):
    """Every other one during a save; the run is killed once more while it resumes."""
    seed = random.randrange(2**32)
    rng, found = random.Random(seed), []
    for number in range(20):
        folder = tmp_path / str(number)
        alive = killed(("anywhere", "saving")[number % 2], flags, folder, whole[1], rng)
        out = folder / "out"
        left = [path.name for path in out.glob("checkpoint-*")] if out.exists() else []
        found.append({"alive": alive, "half": (out / ".saving").exists(), "checkpoints": sorted(left)})
        if (out / "metrics.jsonl").exists() and last_checkpoint(out):
            kill_after(start(["--resume", f"--output_dir={out}"], folder), rng.uniform(0, whole[1]))
        go_on(flags, folder)
        assert_same_run(folder, whole[0])
    print(json.dumps({"seed": seed, "moments": found}))
    assert sum(moment["alive"] for moment in found) >= 15


def test_a_half_written_checkpoint_is_never_taken(flags, whole, tmp_path):
    run = start([*flags, f"--output_dir={tmp_path / 'out'}"], tmp_path)
    kill_while_saving(run, tmp_path / "out", 6, 0)
    out = tmp_path / "out"
    before = last_checkpoint(out)
    assert before is not None
    for number, (name, text) in enumerate([("trainer_state.json", '{"global_st'), ("optimizer.pt", "")]):
        half = out / f"checkpoint-{100 + number}"
        half.mkdir()
        (half / name).write_text(text)
    (out / "checkpoint-old").mkdir()
    assert last_checkpoint(out) == before


def test_the_last_checkpoint_is_the_latest_whole_one(finished):
    whole = finished / "checkpoint-3"
    assert last_checkpoint(finished) == whole
    for step in (20, 100):
        shutil.copytree(whole, finished / f"checkpoint-{step}")
    assert last_checkpoint(finished) == finished / "checkpoint-100"
    weights = finished / "checkpoint-100" / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert last_checkpoint(finished) == finished / "checkpoint-20"


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(train, monkeypatch):
    flushed, named = set(), []
    flush, rename = os.fsync, os.replace

    def noting_flush(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    def noting_rename(source, target):
        if source.name == target.name and source.parent.name == ".saving":
            assert {path.stat().st_ino for path in (source, *source.rglob("*"))} <= flushed
            named.append(target.name)
        rename(source, target)

    monkeypatch.setattr("unsloth_pack.checkpoints.atomic.os.fsync", noting_flush)
    monkeypatch.setattr("unsloth_pack.checkpoints.atomic.os.replace", noting_rename)
    assert train(save_steps=2) == 0
    assert named == ["checkpoint-2", "checkpoint-4"]


def test_killed_between_the_last_update_and_the_end(flags, whole, tmp_path):
    run = start([*flags, f"--output_dir={tmp_path / 'out'}"], tmp_path, die_before_the_adapter_is_saved)
    assert ended(run) == -signal.SIGKILL
    go_on(flags, tmp_path)
    assert_same_run(tmp_path, whole[0])
    assert main(["--resume", f"--output_dir={tmp_path / 'out'}"]) == 2


def test_killed_before_the_first_checkpoint(flags, whole, tmp_path):
    run = start([*flags, f"--output_dir={tmp_path / 'out'}"], tmp_path)
    wait_for(tmp_path / "out" / "metrics.jsonl", run)
    assert kill_after(run, 0)
    metrics = tmp_path / "out" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"kind": "log", "st')  # killed while it wrote a line
    go_on(flags, tmp_path)
    assert_same_run(tmp_path, whole[0])


@pytest.fixture
def streamed(flags, tmp_path):
    """A run on rows that fill the pipe from the process that tokenises them."""
    rng = random.Random(0)
    rows = [{"text": "".join(rng.choices("ab", k=200))} for _ in range(1200)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(flag for flag in flags if not flag.startswith("--dataset=")),
        "--streaming",
        f"--dataset={path}",
    ]


def test_a_killed_stream_leaves_no_process_and_goes_on(streamed, whole, tmp_path):
    assert ended(start([*streamed, f"--output_dir={tmp_path / 'whole' / 'out'}"], tmp_path / "whole")) == 0
    run = start([*streamed, f"--output_dir={tmp_path / 'cut' / 'out'}"], tmp_path / "cut")
    wait_for(tmp_path / "cut" / "out" / f"checkpoint-{EVERY}", run)
    workers = psutil.Process(run.pid).children()
    assert workers
    assert kill_after(run, 0)
    try:
        go_on(streamed, tmp_path / "cut")
    finally:
        _, alive = psutil.wait_procs(workers, timeout=5)
        for each in alive:
            each.kill()
    assert not alive
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_a_random_moment(number, flags, whole, tmp_path):
    run = start([*flags, f"--output_dir={tmp_path / 'out'}"], tmp_path)
    wait_for(tmp_path / "out" / f"checkpoint-{EVERY}", run)
    time.sleep(random.uniform(0, 0.05))
    os.kill(run.pid, number)
    code = ended(run)
    assert code == 128 + number, (tmp_path / "stderr").read_text()
    said = (tmp_path / "stdout").read_text()
    assert f"is whole, go on with: unsloth-pack --resume --output_dir {tmp_path / 'out'}" in said
    go_on(flags, tmp_path)
    assert_same_run(tmp_path, whole[0])


@pytest.mark.parametrize("fault", [leave_the_output_unread, show_ascii_alone])
def test_a_run_does_not_need_its_terminal(fault, flags, whole, tmp_path):
    folder = tmp_path / "é"  # is printed
    assert ended(start([*flags, f"--output_dir={folder / 'out'}"], folder, fault)) == 0
    says_so = "unsloth-pack: nobody reads the output any more; the run goes on\n"
    assert (says_so in (folder / "stderr").read_text()) == (fault is leave_the_output_unread)
    assert_same_run(folder, whole[0])


def test_a_full_disk_leaves_the_last_good_checkpoint(flags, whole, tmp_path):
    run = start([*flags, f"--output_dir={tmp_path / 'out'}"], tmp_path, fill_the_disk_at_the_second_save)
    assert ended(run) == 1
    out = tmp_path / "out"
    said = (tmp_path / "stderr").read_text()
    assert "Traceback" not in said
    assert f"checkpoint-{2 * EVERY} could not be saved" in said
    assert f"checkpoint-{EVERY} is whole, go on with: unsloth-pack --resume" in said
    assert [path.name for path in out.glob("*checkpoint*")] == [f"checkpoint-{EVERY}"]
    assert not (out / ".saving").exists()
    go_on(flags, tmp_path)
    assert_same_run(tmp_path, whole[0])


def full(file_size):
    """Wraps a call, during which no file may grow beyond so many bytes."""

    def limited(call):
        def limited_call(*arguments):
            kept = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, kept[1]))
            try:
                return call(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, kept)

        return limited_call

    return limited


def sent(number):
    """The call, and a signal as it begins."""

    def interrupted(call):
        def interrupted_call(*arguments):
            signal.raise_signal(number)
            call(*arguments)

        return interrupted_call

    return interrupted


@pytest.mark.parametrize("save_steps", [2, None])
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (full(5000), 1, "File too large"),
        (sent(signal.SIGTERM), 143, "interrupted; "),
    ],
)
@pytest.mark.parametrize("at", ["_save_adapter", "_save_merged_and_plot"])
def test_what_goes_wrong_after_the_training(
    at, fault, code, says, save_steps, train, monkeypatch, capsys, tmp_path
):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(unsloth_pack.cli.train, at, fault(getattr(unsloth_pack.cli.train, at)))
        assert train("--save_model", save_steps=save_steps) == code
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (out / "merged").exists()
    assert not list(tmp_path.rglob("*.aside"))
    if save_steps:
        assert "checkpoint-4 is whole, go on with: unsloth-pack --resume" in said
    elif at == "_save_adapter":
        assert "there is no checkpoint yet, start over with: unsloth-pack --resume" in said
    else:
        assert f"the adapter is saved, merge it with: unsloth-pack merge --model_name {out}" in said
        assert main(["merge", "--model_name", str(out), "--save_path", str(out / "merged")]) == 0
        return
    assert main(["--resume", f"--output_dir={out}"]) == 0
    assert (out / "merged" / "model.safetensors").is_file()
