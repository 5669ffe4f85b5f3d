"""The soak: interrupted and resumed over two slices it passes, and each of its judgements can fail."""

import json
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
