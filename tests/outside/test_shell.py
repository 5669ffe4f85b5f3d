"""The command line as shells, services and schedulers start it: folders, streams, variables, copied runs."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import table

import unsloth_pack
from unsloth_pack.cli import main

CLI = Path(__file__).parents[2] / "cli.py"
pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp_path")


@pytest.fixture(scope="module")
def project(tmp_path_factory, model_folder):
    """A folder with `models/tiny` and `rows.json`, whose paths are given relative to it."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(model_folder, folder / "models" / "tiny")
    (folder / "rows.json").write_text(json.dumps([{"text": "ab" * n} for n in range(4, 30)]))
    return folder


def flags_of(project):
    given = {"model_name": project / "models" / "tiny", "dataset": project / "rows.json", "dtype": "float32"}
    given |= {"max_seq_length": 128, "max_steps": 6, "gradient_accumulation_steps": 1}
    return ["--sample_packing", *(f"--{name}={value}" for name, value in given.items())]


@pytest.fixture
def flags(project):
    return flags_of(project)


@pytest.fixture
def finished(project):
    """A complete run whose paths were given relative to `project`, and which merged its model; made once."""
    out = project.parent / f"{project.name}-out"
    if not out.exists():
        flags = [flag.replace(f"{project}/", "") for flag in flags_of(project)]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            assert main([*flags, "--save_steps=2", "--save_model", f"--output_dir=../{out.name}"]) == 0
    return out


@pytest.fixture
def killed(finished, tmp_path):
    """A copy of that run, as a kill after its fourth update would have left it."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"summary"' not in line))
    shutil.rmtree(copy / "merged")
    shutil.copytree(copy / "checkpoint-6", tmp_path / "checkpoint-6")
    shutil.rmtree(copy / "checkpoint-6")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copy / name).unlink()
    return copy


def weights(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def assert_same(one, other):
    """The same tensors; their files may list them in another order."""
    one, other = load_file(one), load_file(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# Mistakes that need no torch

SIMPLE = {
    "--dataset=gone.json": "gone.json: file not found",
    "--model_name=./gone": "cannot load ./gone: no such folder",
    "--dataset=rows.json --output_dir=models": "output_dir 'models' holds",
    "--fsdp=full": "fsdp shards over several processes and this is one",
    "pack --dataset=gone.json --out=packs": "gone.json: file not found",
    "stats --dataset=gone.json": "gone.json: file not found",
    "verify --model_name=./gone": "cannot load ./gone: no such folder",
    "bench --model_name=./gone": "cannot load ./gone: no such folder",
    "generate --model_name=./gone --prompt=a": "cannot load ./gone: no such folder",
    "chat ./gone": "cannot load ./gone: no such folder",
    "chat demo --compare": "compare is true, and demo is no adapter",
}
IN_TURN = """
import sys
from unsloth_pack.cli import main
for command in sys.argv[1:]:
    print(main(command.split()), "torch" in sys.modules)
"""


def test_simple_mistakes_and_the_version_need_no_torch(project):
    """Its import takes seconds."""
    (project / "models" / "loss.png").write_bytes(b"")
    command = [sys.executable, "-c", IN_TURN, "--version", *SIMPLE]
    environment = os.environ | {"PYTHONPATH": str(CLI.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment)
    (project / "models" / "loss.png").unlink()
    assert done.stdout == f"unsloth-pack {unsloth_pack.__version__}\n0 False\n" + "2 False\n" * len(SIMPLE)
    for line, told in zip(done.stderr.splitlines(), SIMPLE.values(), strict=True):
        assert told in line


# Runs and models that are resumed and merged elsewhere


def test_a_copied_run_merges_into_the_copy(finished, killed):
    merged = finished / "merged" / "model.safetensors"
    before = merged.stat()
    assert main(["--resume", "--output_dir=copy"]) == 0
    assert_same(killed / "merged" / "model.safetensors", merged)
    assert merged.stat().st_mtime_ns == before.st_mtime_ns, "the copy wrote over the model of the original"


def test_a_run_is_resumed_from_any_folder(project, finished, killed, tmp_path, monkeypatch):
    """Not with a model of the same relative name that happens to lie there."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project / "models", elsewhere / "models")
    shutil.copy(project / "rows.json", elsewhere)
    other = elsewhere / "models" / "tiny" / "model.safetensors"
    save_file({name: 2 * weight for name, weight in load_file(other).items()}, other, {"format": "pt"})
    monkeypatch.chdir(elsewhere)
    assert main(["--resume", "--output_dir=../copy", f"--dataset={project / 'rows.json'}"]) == 0
    assert weights(killed) == weights(finished)


def test_a_run_is_resumed_where_its_whole_project_was_moved_to(
    project, finished, killed, tmp_path, monkeypatch
):
    moved = tmp_path / "moved"
    shutil.copytree(project, moved)
    metrics = killed / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(str(project), str(tmp_path / "gone")))
    monkeypatch.chdir(moved)
    assert main(["--resume", "--output_dir=../copy"]) == 0
    assert weights(killed) == weights(finished)


# Checkpoints that are not what they were


@pytest.mark.parametrize(
    ("part", "left"), [("adapter_model.safetensors", 0.9), ("optimizer.pt", 0), ("counts.json", None)]
)
def test_a_checkpoint_of_which_a_part_is_missing_or_cut_is_not_taken(part, left, refused, finished, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(finished / "metrics.jsonl", copy)
    shutil.copytree(finished / "checkpoint-4", copy / "checkpoint-4")
    path = copy / "checkpoint-4" / part
    whole = path.read_bytes()
    path.unlink() if left is None else path.write_bytes(whole[: int(left * len(whole))])
    assert "checkpoint-4 in 'copy' is not whole" in refused(["--resume", "--output_dir=copy"])


def test_the_checkpoint_before_a_cut_one_is_taken(finished, killed, tmp_path):
    shutil.copytree(tmp_path / "checkpoint-6", killed / "checkpoint-6")
    optimizer = killed / "checkpoint-6" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    assert main(["--resume", "--output_dir=copy"]) == 0
    assert weights(killed) == weights(finished)


def test_a_checkpoint_of_another_run_is_refused(flags, refused, killed, tmp_path):
    assert main([*flags, "--r=4", "--save_steps=5", "--output_dir=other"]) == 0  # its first loss is the same
    shutil.copytree(tmp_path / "other" / "checkpoint-5", killed / "checkpoint-5")
    assert "checkpoint-5 in 'copy' is of another run" in refused(["--resume", "--output_dir=copy"])


# Variables and paths


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is 1"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"},
            "WORLD_SIZE is 2 in the environment and LOCAL_RANK",
        ),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0 in the environment and MASTER_ADDR is not set"),
        ({"RANK": "first"}, "RANK is 'first'"),
    ],
)
def test_what_a_launcher_left_in_the_environment(variables, told, flags, refused, monkeypatch, tmp_path):
    """With RANK=1 alone, a run would train to its end and save nothing."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert told in refused([*flags, "--output_dir=out"])
    assert not (tmp_path / "out").exists()


HANG_UP = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_terminal_that_is_closed_leaves_a_checkpoint(flags, tmp_path):
    """As a lost connection does: every output fails from then on, and SIGHUP comes."""
    terminal, end = os.openpty()
    flags = [flag.replace("max_steps=6", "max_steps=5000") for flag in flags]
    command = [sys.executable, str(CLI), *flags, f"--output_dir={tmp_path / 'out'}"]
    run = subprocess.Popen([sys.executable, "-c", HANG_UP, *command], stdin=end, stdout=end, stderr=end)
    os.close(end)
    metrics = tmp_path / "out" / "metrics.jsonl"
    reader = threading.Thread(target=read_until_closed, args=[terminal], daemon=True)
    reader.start()
    deadline = time.monotonic() + 300
    while not (metrics.exists() and '"loss"' in metrics.read_text()) and run.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.close(terminal)
    assert run.wait(timeout=120) == 128 + signal.SIGHUP
    assert '"stopped"' in metrics.read_text().splitlines()[-1]
    assert list((tmp_path / "out").glob("checkpoint-*"))


def read_until_closed(terminal):
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


# ---- completion


@pytest.fixture(scope="module")
def completed():
    """What bash offers for the last of these words."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["--print-completion", "bash"]) == 0
    script = said.getvalue()
    function = re.search(r"complete .*-F (\w+) unsloth-pack", script)[1]
    offer = f'\nCOMP_WORDS=("$@") COMP_CWORD=$(($# - 1))\n{function}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'

    def complete(*words):
        command = ["bash", "-c", script + offer, "unsloth-pack", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()

    return complete


@table(
    ("words", "offered"),
    [
        (["st"], ["stats"]),
        (["--load_in"], ["--load_in_4bit", "--load_in_8bit", "--load_in_fp8"]),
        (["estimate", "--gp"], ["--gpu"]),
        (["merge", "--save_method", "lora_"], ["lora_vllm"]),
    ],
)
def test_bash_completes(completed, words, offered):
    assert completed("unsloth-pack", *words) == offered


def test_completion_needs_shtab_and_a_known_shell(monkeypatch, capsys):
    assert main(["--print-completion", "cmd"]) == 2
    assert "--print-completion: invalid choice: 'cmd'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "--print-completion needs shtab; pip install shtab" in capsys.readouterr().err


@pytest.mark.nightly
def test_ctrl_c_at_a_terminal_stops_an_answer_and_ctrl_d_ends_the_chat(tmp_path):
    terminal, end = os.openpty()
    command = [sys.executable, str(CLI), "chat", "demo", "--temperature=5", "--max_new_tokens=1900"]
    chat = subprocess.Popen([sys.executable, "-c", HANG_UP, *command], stdin=end, stdout=end, stderr=end)
    os.close(end)

    def read_to(text):
        shown = b""
        while text not in shown:
            shown += os.read(terminal, 4096)

    read_to(b"> ")
    os.write(terminal, b"half a line\x03")
    read_to(b"\n> ")
    os.write(terminal, b"Sort\n")
    read_to(b"Sort\r\n")
    os.read(terminal, 1)  # of the answer
    os.write(terminal, b"\x03")
    read_to(b"\n> ")
    os.write(terminal, b"/save chat.jsonl\n")
    read_to(b"\n> ")
    os.write(terminal, b"\x04")
    assert chat.wait(timeout=60) == 0
    asked, answered = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    assert asked["content"] == "Sort"
    assert 0 < len(answered["content"].split()) < 1000
