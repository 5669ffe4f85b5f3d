"""`unsloth-pack chat`: history, commands, the base beside the adapter, and what is refused."""

import io
import json
import re
import sys

import pytest
import torch
from model_folder import save_model
from tables import table

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.cli import main
from unsloth_pack.cli.answers import Streamer

FIRST, SECOND = "Sort the words.\nwords: kiwi bee van", "Count the words.\nwords: cap black"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """An adapter on the bundled model that changes its answers."""
    folder = tmp_path_factory.mktemp("adapter")
    model, _ = FastLanguageModel.from_pretrained("demo", dtype="float32")
    model = FastLanguageModel.get_peft_model(model, r=4)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return str(folder)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs the command on some lines; what it prints, or the line that refuses it."""

    def run(name, *lines, flags=(), code=0, stream=io.StringIO):
        typed = (line.replace("\n", "\\\n") for line in lines)
        monkeypatch.setattr(sys, "stdin", stream("".join(f"{line}\n" for line in typed)))
        capsys.readouterr()
        assert main(["chat", str(name), "--dtype=float32", "--max_new_tokens=12", *flags]) == code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return said.err if code else said.out

    return run


def saved(path):
    (line,) = path.read_text().splitlines()
    return json.loads(line)["messages"]


def answer(name, turns):
    """What transformers answers to these turns."""
    model, tokenizer = FastLanguageModel.from_pretrained(name, dtype="float32")
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    ids = FastLanguageModel.for_inference(model).generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_every_answer_sees_the_system_prompt_and_all_earlier_turns(chat, tmp_path):
    shown = chat("demo", FIRST, SECOND, "/save all.jsonl", flags=["--system=Be brief."])
    turns = saved(tmp_path / "all.jsonl")
    assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * 2]
    assert [turns[n]["content"] for n in (0, 1, 3)] == ["Be brief.", FIRST, SECOND]
    assert [line.strip() for line in shown.splitlines()] == [turns[2]["content"], turns[4]["content"]]
    for n in (2, 4):
        assert turns[n]["content"] == answer("demo", turns[:n])
    assert turns[4]["content"] != answer("demo", [turns[3]])


def test_reset_keeps_the_system_prompt_alone(chat, tmp_path):
    chat("demo", FIRST, "/reset", SECOND, "/save all.json", flags=["--system=Be brief."])
    turns = saved(tmp_path / "all.json")
    assert [turn["content"] for turn in turns] == ["Be brief.", SECOND, answer("demo", turns[:2])]


def test_what_is_saved_is_data_and_replaces_no_file(chat, tmp_path):
    chat("demo", FIRST, "/save all.jsonl")
    before = (tmp_path / "all.jsonl").read_text()
    assert main(["stats", "--dataset", "all.jsonl", "--pack_lengths=256"]) == 0
    assert "all.jsonl' cannot be written (File exists)" in chat("demo", SECOND, "/save all.jsonl", code=2)
    assert (tmp_path / "all.jsonl").read_text() == before


def test_the_base_stands_beside_the_adapter_which_goes_on(chat, adapter, tmp_path):
    shown = chat(adapter, FIRST, SECOND, "/save all.jsonl", flags=["--compare"])
    turns = saved(tmp_path / "all.jsonl")
    pairs = re.findall(r"^│ (.*?) *│ (.*?) *│$", shown, re.MULTILINE)
    assert len(pairs) == 2
    assert pairs[0][0] != pairs[0][1]
    for (base, adapted), n in zip(pairs, (1, 3), strict=True):
        assert adapted == turns[n]["content"] == answer(adapter, turns[:n])
        assert base == answer("demo", turns[:n])


def test_biases_that_the_adapter_replaces_have_no_base_to_compare_with(chat, tmp_path):
    base = save_model(tmp_path / "base", "qwen2")
    model, _ = FastLanguageModel.from_pretrained(base, max_seq_length=64, dtype="float32")
    FastLanguageModel.get_peft_model(model, r=4, bias="all").save_pretrained(tmp_path / "adapter")
    said = chat(tmp_path / "adapter", flags=["--compare"], code=2)
    assert "compare is true, and the adapter replaces" in said


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat, monkeypatch, tmp_path):
    whole = answer("demo", [{"role": "user", "content": FIRST}])
    put, calls = Streamer.put, []

    def interrupted(self, value):
        put(self, value)
        calls.append(value)
        if len(calls) == 3:  # the prompt, and two tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(Streamer, "put", interrupted)
    chat("demo", FIRST, SECOND, "/save all.jsonl")
    turns = saved(tmp_path / "all.jsonl")
    assert whole.startswith(turns[1]["content"])
    assert 0 < len(turns[1]["content"]) < len(whole)
    assert turns[3]["content"] == answer("demo", turns[:3])


def test_a_mistake_at_a_terminal_is_one_line_and_the_chat_goes_on(chat, tmp_path):
    lines = ["/rest", "/save all.jsonl", "/image a.png", FIRST, "/save all.txt", "/save all.jsonl"]
    shown = chat("demo", *lines, stream=Terminal)
    assert shown.count("> ") == len(lines) + 1
    assert saved(tmp_path / "all.jsonl")[0]["content"] == FIRST


@table(
    ("lines", "flags", "says"),
    [
        (["/rest"], [], "'/rest' is no command; use /reset, /save FILE"),
        (["/save all.jsonl"], [], "there is no answer to save yet"),
        (["/image a.png"], [], "demo takes no images; leave out"),
        ([FIRST, "/save all.txt"], [], "'all.txt'; give a name that ends in .jsonl or .json"),
        (["a"], ["--max_new_tokens=2048"], "but the model has 2048 positions; /reset begins anew, or lower"),
        ([], ["--compare"], "compare is true, and demo is no adapter"),
        ([], ["--temperature=-1"], "temperature is '-1'"),
        ([], ["--top_p=0.5"], "top_p is 0.5 without temperature"),
    ],
)
def test_what_is_refused(lines, flags, says, chat):
    said = chat("demo", *lines, flags=flags, code=2)
    assert says in said
    assert said.count("\n") == 1


def test_a_model_that_is_not_there(chat):
    assert "cannot load ./gone: no such folder" in chat("./gone", code=2)


def test_sampling_repeats_with_its_seed(chat):
    told = [
        chat("demo", FIRST, flags=["--temperature=5", f"--seed={seed}", *more])
        for seed, more in ((1, []), (1, []), (2, []), (2, ["--top_k=1"]), (3, ["--top_p=1e-6"]))
    ]
    assert told[0] == told[1] != told[2]
    assert told[3] == told[4] == chat("demo", FIRST)


def test_a_model_without_a_chat_template_continues_the_text(chat, capsys, tmp_path):
    plain = save_model(tmp_path / "plain", chat_template=None)
    chat(plain, "ab", "cd", "/save all.jsonl")
    turns = saved(tmp_path / "all.jsonl")
    assert (
        main(["generate", f"--model_name={plain}", "--dtype=float32", "--max_new_tokens=12", "--prompt=ab"])
        == 0
    )
    assert capsys.readouterr().out.strip() == turns[1]["content"]
