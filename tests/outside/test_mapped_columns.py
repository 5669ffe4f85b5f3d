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
    ("row", "mapping", "text"),
    [
        ({"question": "q", "answer": "a"}, "question=prompt,answer=completion", "qa<eos>"),
        (
            {"id": "x", "system_prompt": "s", "question": "q", "response": "a"},
            "system_prompt=system,question=instruction,response=output",
            "[system]s" + CHAT,
        ),
        ({"dialog": TURNS}, "dialog=messages", CHAT),
        ({"frob": "t", "n": 1}, "frob=text", "t<eos>"),
        (
            {"my question, or so": "q", "the=answer": "a"},
            '{"my question, or so": "prompt", "the=answer": "completion"}',
            "qa<eos>",
        ),
    ],
)
def test_a_mapping_trains(refusal, trained, row, mapping, text):
    line = refusal([row, row])
    assert "no known data format has the columns" in line
    assert "; map them with --columns to messages, prompt, completion or text" in line
    assert [made for made, _ in trained([row, row], f"--columns={mapping}")] == [text] * 2


@pytest.mark.parametrize(
    "row", [{"chat": json.dumps(THEIRS)}, {"prompt": json.dumps(TURNS[:1]), "completion": "a"}]
)
def test_turns_as_json_text_are_no_text(refusal, row):
    line = refusal([row])
    assert "no known data format" in refusal([{"a1": "x", "b1": "y"}])
    assert "holds turns as JSON text; write them as a list of objects" in line


def test_a_preference_is_kept_as_its_better_answer(refusal, trained):
    for row in (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": TURNS, "rejected": TURNS},
        {"instruction": "q", "chosen": "a", "rejected": "b"},
    ):
        line = refusal([row])
        assert "chosen, rejected are preferences; train with --objective dpo, or on the better" in line
        (said,) = re.findall(r"with (--columns \S+)", line)
        ((text, _),) = trained([row], *shlex.split(said))
        assert text in ("qa<eos>", CHAT)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (
            "quest=prompt,answer=completion",
            "columns maps 'quest', and there is no such column among question, ",
        ),
        ("question=prompt,answer=text", "there is a column 'text' already; leave it out with --columns"),
        ("question=prompt", "columns maps 'question' to 'prompt', which the rows are not made of"),
    ],
)
def test_a_mapping_that_cannot_be(refusal, flag, says):
    assert says in refusal([{"question": "q", "answer": "a", "text": "t"}], f"--columns={flag}")


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


def test_a_run_shares_a_mapping_with_its_evaluation(sets, model_folder, refused):
    flags = [f"--model_name={model_folder}", "--max_steps=1", "--max_seq_length=128", "--sample_packing"]
    flags += [MAPPED, "--streaming", "--num_proc=1"]
    both = ["--dataset=asked.jsonl,texts.jsonl", "--eval_dataset=texts.jsonl", "--output_dir=out"]
    assert main([*flags, *both]) == 0
    data = [json.loads(line) for line in (sets / "out/metrics.jsonl").read_text().splitlines()]
    parts = next(line["data_sets"] for line in data if line["kind"] == "data" and line["use"] == "train")
    assert [part["unused_columns"] for part in parts] == [["id"], []]
    line = refused([*flags, "--dataset=chats.jsonl,texts.jsonl"])
    assert "columns maps 'answer', and no data set has such a column" in line
