"""The soak: interrupted and resumed over two slices it passes, and each of its judgements can fail."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from killed_runs import forked

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import soak
import soak_judgement

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in forked processes"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of the formats that a mixture may have."""
    folder = tmp_path_factory.mktemp("files")
    short = [{"instruction": "add", "input": f"{i} 1", "output": str(i + 1)} for i in range(30)]
    turns = [
        {"from": "human", "value": "what is it?"},
        {"from": "function_call", "value": '{"name": "look"}'},
        {"from": "observation", "value": "an ape"},
        {"from": "gpt", "value": "It is an ape."},
    ]
    (folder / "alpaca.json").write_text(json.dumps(short))
    (folder / "calls.json").write_text(json.dumps([{"conversations": turns, "tools": "[]"}] * 6))
    chat = [{"role": "user", "content": "What is an eel?"}, {"role": "assistant", "content": "A fish."}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 6)
    (folder / "plain.jsonl").write_text(
        "".join(json.dumps({"text": "word " * i}) + "\n" for i in range(1, 9))
    )
    (folder / "plain.txt").write_text("\n".join("a line of it " * i for i in range(1, 6)))
    (folder / "README.md").write_text("not data")
    return folder


@pytest.fixture(scope="module")
def soaked(files, tmp_path_factory):
    """Two interruptions in one place, then two sessions in another; and what was reported."""
    folder = tmp_path_factory.mktemp("soak")
    given = {"data": files, "minutes": 60, "sessions": 2, "shape": "demo", "tokens": 64, "epochs": 12}
    given |= {"save_steps": 5, "every": 16, "seed": 3, "state": folder / "state"}
    given |= {"json": folder / "report.json"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "context", SimpleNamespace(Process=forked))
        patch.setattr(soak_judgement, "WARM_UP", 4)
        for work in ("first", "second"):
            command = [f"--{name}={value}" for name, value in given.items()]
            assert soak.main([*command, f"--work={folder / work}"]) == 0
    return folder / "second", json.loads((folder / "report.json").read_text())


def test_it_goes_on_in_another_place(soaked):
    _, report = soaked
    assert report["slices"] == 2
    assert report["SIGKILL"] > 0
    assert report["SIGTERM"] > 0
    assert report["SIGKILL"] + report["SIGTERM"] >= 3
    assert report["of them during a save"] >= 1
    assert sum(resume["again"] for resume in report["resumes"]) > 0
    judged = {judgement["name"]: judgement["passed"] for judgement in report["judgements"]}
    assert judged.pop("gpu memory flat") is None
    assert set(judged.values()) == {True}


def change(path, change_lines):
    """Let `change_lines` alter the lines of a file of JSON lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change_lines(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def updates(lines):
    return [line for line in lines if "loss" in line]


def repeat_a_row(notes, metrics):
    def alter(lines):
        updates(lines)[-1]["rows"] = updates(lines)[-2]["rows"]

    change(notes[-1], alter)


def lose_an_update(notes, metrics):
    change(metrics, lambda lines: lines.remove(updates(lines)[5]))


def let_the_loss_jump(notes, metrics):
    """By as much in what the processes noted as in the metrics, from the first resume on."""
    start = json.loads(notes[1].read_text().splitlines()[0])["from"]

    def alter(lines):
        for line in updates(lines):
            line["loss"] += 50 * (line["step"] > start)

    for path in [*notes, metrics]:
        change(path, alter)


def lose_the_bits_of_a_loss(notes, metrics):
    """Of updates that were made again later."""
    again = json.loads(notes[2].read_text().splitlines()[0])["from"]

    def alter(lines):
        for line in updates(lines):
            line["loss"] *= 1 + 1e-7 * (line["step"] > again)

    change(notes[1], alter)


def count_a_token_more(notes, metrics):
    def alter(lines):
        updates(lines)[-1]["num_tokens"] += 1

    change(metrics, alter)


def lose_an_evaluation(notes, metrics):
    change(metrics, lambda lines: lines.remove(next(line for line in lines if "eval_loss" in line)))


def let_host_memory_grow(notes, metrics):
    for path in notes:
        change(path, lambda lines: [grow(line, "host", i) for i, line in enumerate(updates(lines))])


def let_gpu_memory_grow(notes, metrics):
    for path in notes:
        change(path, lambda lines: [grow(line, "gpu", i) for i, line in enumerate(updates(lines))])


def grow(line, kind, number):
    line[kind] = 2**30 + number * 2**24


@pytest.mark.parametrize(
    ("tamper", "fails"),
    [
        (repeat_a_row, "rows neither repeated nor missing"),
        (lose_an_update, "every update once"),
        (let_the_loss_jump, "loss continuous"),
        (lose_the_bits_of_a_loss, "same losses again"),
        (count_a_token_more, "ledger exact"),
        (lose_an_evaluation, "evaluations"),
        (let_host_memory_grow, "host memory flat"),
        (let_gpu_memory_grow, "gpu memory flat"),
    ],
)
def test_each_judgement_can_fail(tamper, fails, soaked, tmp_path, files, monkeypatch):
    monkeypatch.setattr(soak_judgement, "WARM_UP", 4)
    work = shutil.copytree(soaked[0], tmp_path / "work")
    command = [f"--data={files}", f"--work={work}", "--minutes=0", f"--json={tmp_path / 'report.json'}"]
    assert soak.main(command) == 0
    tamper(sorted((work / "sessions").iterdir()), work / "runs" / "1" / "metrics.jsonl")
    assert soak.main(command) == 1
    judged = json.loads((tmp_path / "report.json").read_text())["judgements"]
    assert fails in [judgement["name"] for judgement in judged if judgement["passed"] is False]
