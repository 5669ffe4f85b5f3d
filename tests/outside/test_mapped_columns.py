"""`--columns`: files that follow no format, under the names that a format has."""

import json
import re
import shlex

import pytest
from tables import table

from unsloth_pack.cli import main

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
THEIRS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
MAPPED = "--columns=question=prompt,answer=completion"
CHAT = "[user]q[assistant]a<eos>"


@table(
    ("row", "suggested", "text"),
    [
        ({"question": "q", "answer": "a"}, "question=prompt,answer=completion", "qa<eos>"),
        ({"instruction": "q", "response": "a"}, "instruction=prompt,response=completion", "qa<eos>"),
        ({"user_query": "q", "modelReply": "a"}, "user_query=prompt,modelReply=completion", "qa<eos>"),
        ({"question": "q", "context": "c", "answer": "a"}, None, "[user]q\nc[assistant]a<eos>"),
        (
            {"id": "x", "system_prompt": "s", "question": "q", "response": "a"},
            "system_prompt=system,question=instruction,response=output",
            "[system]s" + CHAT,
        ),
        ({"system_message": "s", "dialog": TURNS}, "system_message=system,dialog=", "[system]s" + CHAT),
        ({"system": "s", "question": "q", "answer": "a"}, "question=instruction,", "[system]s" + CHAT),
        ({"dialog": TURNS}, "dialog=messages", CHAT),
        ({"content": "t", "title": "x"}, "content=text", "t<eos>"),
        ({"frob": "t", "n": 1}, "frob=text", "t<eos>"),
        ({"my question, or so": "q", "the=answer": "a"}, "{", "qa<eos>"),
        ({"what's the question": "q", "answer": "a"}, "what", "qa<eos>"),
    ],
)
def test_the_mapping_that_is_suggested_trains(refusal, trained, row, suggested, text):
    """As it stands in the error, pasted into a shell."""
    line = refusal([row, row])
    assert "no known data format has the columns" in line
    (said,) = re.findall(r"; try (.*)", line)
    assert suggested is None or suggested in said
    assert [made for made, _ in trained([row, row], *shlex.split(said))] == [text] * 2


@pytest.mark.parametrize(
    "row",
    [
        {"a1": "x", "b1": "y", "n": 2},
        {"prompt": TURNS[:1], "answer": "a"},  # turns without an answer are no messages
        {"input": {"messages": TURNS[:1]}, "preferred_output": TURNS[1:], "non_preferred_output": TURNS[1:]},
    ],
)
def test_no_suggestion_where_nothing_speaks_for_one(refusal, row):
    line = refusal([row])
    assert "=" not in line.rpartition("; ")[2]
    assert (
        "preferences" in line or "; map them with --columns to messages, prompt, completion or text" in line
    )


@pytest.mark.parametrize("rest", [{}, {"completion": json.dumps(TURNS[1:])}])
@pytest.mark.parametrize(("name", "turns"), [("messages", TURNS), ("prompt", TURNS[:1]), ("chat", THEIRS)])
def test_turns_as_json_text_are_no_text(refusal, name, turns, rest):
    line = refusal([{name: json.dumps(turns), **rest}])
    assert "holds turns as JSON text; write them as a list of objects" in line


def test_functions_are_offered_as_tools(refusal, trained):
    row = {"messages": TURNS, "functions": [{"name": "f", "parameters": {}}]}
    (said,) = re.findall(r"give (--columns \S+) or", refusal([row]))
    assert '"name": "f"' in trained([row], *shlex.split(said))[0][0]


def test_a_preference_is_kept_as_its_better_answer(refusal, trained):
    for row in (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
        {"chosen": TURNS, "rejected": TURNS},
        {"instruction": "q", "chosen": "a", "rejected": "b"},
    ):
        (said,) = re.findall(r"give (--columns \S+)", refusal([row]))
        ((text, _),) = trained([row], *shlex.split(said))
        assert text in ("qa<eos>", CHAT)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (
            "quest=prompt,answer=completion",
            "columns maps 'quest', and there is no such column among question, ",
        ),
        ("question=prompt,answer=text", "there is a column 'text' already; leave that out with --columns"),
        ("question=promt", "question is 'promt'; give one of chat_template_kwargs, "),
        ("question=prompt,answer=prompt", "give each column another name, not 'prompt' twice"),
        ("question=prompt", "columns maps 'question' to 'prompt', which the rows are not made of"),
    ],
)
def test_a_mapping_that_cannot_be(refusal, flag, says):
    assert says in refusal([{"question": "q", "answer": "a", "text": "t"}], f"--columns={flag}")


def test_the_way_out_of_a_name_that_is_taken(refusal, trained):
    row = {"question": "q", "prompt": 7, "completion": "a"}
    (said,) = re.findall(r"leave that out with (--columns \S+)", refusal([row], "--columns=question=prompt"))
    assert [made for made, _ in trained([row], *shlex.split(said))] == ["qa<eos>"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"question": "q", "answer": 5}], "row 0, column 'answer': expected a string, got 5; "),
        ([{"question": "q", "answer": "a", "label": False}], f"give {MAPPED.replace('=', ' ', 1)},label="),
        ([{"question": "q", "answer": "a", "system": "s"}], f"give {MAPPED.replace('=', ' ', 1)},system="),
    ],
)
@pytest.mark.parametrize("stream", [[], ["--streaming", "--max_steps=1"]], ids=["read", "streamed"])
def test_columns_have_their_own_names_in_errors(rows, says, stream, model_folder, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = ["--model_name", str(model_folder), "--dataset", str(tmp_path / "rows.jsonl"), MAPPED, *stream]
    assert main([*command, "--max_seq_length", "128", "--output_dir", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


def test_what_is_offered_keeps_the_mapping_that_is_there(refusal, trained):
    """A preference, and columns of no known format."""
    row = {"question": "q", "chosen": "a", "rejected": "b"}
    (said,) = re.findall(r"give (--columns \S+)", refusal([row], "--columns=question=prompt"))
    assert said == "--columns question=prompt,chosen=completion,rejected="
    assert [made for made, _ in trained([row], *shlex.split(said))] == ["qa<eos>"]
    row = {"ask": "q", "answer": "a"}
    line = refusal([row], "--columns=ask=prompt")
    assert "has the columns ask (str), answer (str); try " in line
    assert line.endswith("--columns ask=prompt,answer=completion")


@pytest.fixture
def sets(tmp_path, monkeypatch):
    rows = {
        "asked": {"question": "q", "answer": "a", "id": 3},
        "chats": {"messages": TURNS, "question": "q", "source": "web"},
        "plain": {"prompt": "p", "completion": "c", "question": "q"},
        "texts": {"text": "t"},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packed(sets, capsys, *flags):
    """What `pack --json` prints of data sets, or the line that refuses them."""
    code = main(["pack", *flags, "--json", f"--out={sets / 'packs'}"])
    out, error = capsys.readouterr()
    return json.loads(out)["data_sets"] if code == 0 else error


def test_a_mapping_beside_several_data_sets_is_for_those_that_have_its_columns(sets, capsys):
    parts = packed(sets, capsys, "--dataset=asked.jsonl,texts.jsonl", MAPPED)
    assert [(part["documents"], part["unused_columns"]) for part in parts] == [(1, ["id"]), (1, [])]


def test_a_mapping_that_no_data_set_can_use(sets, capsys):
    line = packed(sets, capsys, "--dataset=asked.jsonl,texts.jsonl", "--columns=quest=prompt")
    assert (
        "columns maps 'quest', and no data set has such a column: asked.jsonl (question, answer, id), "
        in line
    )
    assert "texts.jsonl (text); correct it" in line
    line = packed(sets, capsys, "--dataset=texts.jsonl", MAPPED)
    assert "columns maps 'question', 'answer', and there is no such column among text; correct it" in line


@pytest.mark.parametrize("other", ["chats", "plain"])
def test_a_shared_mapping_that_spoils_one_data_set(sets, capsys, other):
    """The way out is said for that data set alone, and works."""
    line = packed(sets, capsys, f"--dataset=asked.jsonl,{other}.jsonl", MAPPED)
    assert f"{other}.jsonl: columns maps 'question' to 'prompt'" in line
    (said,) = re.findall(r"(?:leave that out with|give) columns of its own: (\{.*?\}) in its item", line)
    items = ["asked.jsonl", {"path": f"{other}.jsonl", "columns": json.loads(said)}]
    parts = packed(sets, capsys, f"--dataset={json.dumps(items)}", MAPPED)
    assert [part["documents"] for part in parts] == [1, 1]


@pytest.mark.parametrize("stream", [[], ["--streaming"]], ids=["whole", "streamed"])
def test_a_run_shares_a_mapping_with_its_evaluation(sets, model_folder, stream, refused):
    flags = [f"--model_name={model_folder}", "--max_steps=1", "--max_seq_length=128", "--sample_packing"]
    flags += [MAPPED, *stream, "--num_proc=1"]
    both = ["--dataset=asked.jsonl,texts.jsonl", "--eval_dataset=texts.jsonl", "--output_dir=out"]
    assert main([*flags, *both]) == 0
    data = [json.loads(line) for line in (sets / "out/metrics.jsonl").read_text().splitlines()]
    parts = next(line["data_sets"] for line in data if line["kind"] == "data" and line["use"] == "train")
    assert [part["unused_columns"] for part in parts] == [["id"], []]
    line = refused([*flags, "--dataset=chats.jsonl,texts.jsonl"])
    assert "columns maps 'answer', and no data set has such a column" in line
