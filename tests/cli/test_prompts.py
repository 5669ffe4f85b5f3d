"""`unsloth-pack generate --prompts`: many prompts, answered together as they would be one by one."""

import json

import pytest
from tables import table

from unsloth_pack.cli import main

PROMPTS = ["Sort the words.\nwords: kiwi bee van cap black fig ship", "Hi", "Count the words.\nwords: cap"]
COMMAND = ["generate", "--model_name=demo", "--dtype=float32", "--max_new_tokens=12"]


@pytest.fixture
def file(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    rows = [{"id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    rows.append({"id": 3, "messages": [system, {"role": "user", "content": PROMPTS[0]}]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_are_answered_as_one_by_one(file, capsys, tmp_path):
    expected = []
    for prompt in PROMPTS:
        assert main([*COMMAND, f"--prompt={prompt}"]) == 0
        expected.append(capsys.readouterr().out.strip())
    assert main([*COMMAND, f"--prompts={file}"]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in shown.splitlines()]
    assert [row["generated_text"] for row in rows[:3]] == expected
    for row, line in zip(rows, file.read_text().splitlines(), strict=True):
        assert {**json.loads(line), "generated_text": row["generated_text"]} == row
    assert rows[3]["generated_text"] != expected[0]
    assert main([*COMMAND, f"--prompts={file}", "--batch_size=1", "--out=answers.jsonl"]) == 0
    assert (tmp_path / "answers.jsonl").read_text() == shown


def test_every_line_of_a_text_file_is_a_prompt(capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\nSort the words.\n")
    assert main([*COMMAND, "--prompts=prompts.txt"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["Hi", "Sort the words."]


def test_variables_reach_the_chat_template(capsys, tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"prompt": PROMPTS[0], "tools": None}, {"prompt": PROMPTS[0], "tools": tools}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*COMMAND, "--prompts=prompts.jsonl"]) == 0
    without, beside = (json.loads(line)["generated_text"] for line in capsys.readouterr().out.splitlines())
    assert without != beside


@table(
    ("row", "flags", "says"),
    [
        ({"question": "a"}, [], "row 0, column 'text': expected a list of turns"),
        ({"prompt": " "}, [], "row 0, column 'prompt': expected some text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, [], "the last turn is an answer"),
        ({"prompt": "a" * 9999}, [], "row 0: the prompt has"),
        ({"prompt": "a", "images": ["a.png"]}, [], "row 0: demo takes no images"),
        ({"prompt": "a"}, ["--prompt=a"], "prompt and prompts are both given"),
        ({"prompt": "a"}, ["--out=there.jsonl"], "out is 'there.jsonl'; give a new file"),
        ({"prompt": "a"}, ["--out=no/answers.jsonl"], "give a new file in a folder that is there"),
    ],
)
def test_what_is_refused(row, flags, says, refused, tmp_path):
    (tmp_path / "there.jsonl").write_text("")
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    assert says in refused(command=[*COMMAND, "--prompts=one.jsonl", *flags])


@table(
    ("flags", "says"),
    [
        (["--out=a.jsonl"], "out is 'a.jsonl' without prompts"),
        (["--prompts=gone.jsonl"], "gone.jsonl: file not found"),
    ],
)
def test_files_that_are_not_there(flags, says, refused):
    assert says in refused(command=[*COMMAND, *flags])
