"""Every column and value that trains something in the tool it was made for: it acts here, or is refused.

`pack` shows what would be trained on, without training.
"""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_folder import save_model
from outside_models import TELLING_TEMPLATE
from tables import table

from unsloth_pack.cli import main

USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CHAT = {"messages": [USER, REPLY]}
SHARE = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "q", "output": "a"}
PAIR = {"prompt": "q", "completion": "a"}
CHAT_PAIR = {"prompt": [USER], "completion": [REPLY]}
TEXT = {"text": "t"}
FUNCTION = {"name": "f", "parameters": {"unit": {"type": "string", "default": None}}}
TOOL = {"type": "function", "function": FUNCTION}


def calling(arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}


# ---- chat_template_kwargs


@pytest.mark.parametrize(
    ("row", "flags", "loss"),
    [
        (CHAT, ["--train_on_responses_only"], "a<eos>"),
        (ALPACA, [], "a<eos>"),
    ],
)
def test_template_kwargs_reach_the_template_row_by_row(trained, row, flags, loss):
    kwargs = [{"enable_thinking": False}, {"enable_thinking": True}, {}, None]
    rows = [row | {"chat_template_kwargs": given} for given in kwargs]
    whole = "[user]q[assistant]a<eos>"
    (first, learned), second, *others = trained([*rows, row], *flags)
    assert (first, second[0]) == ("[thinking False]" + whole, "[thinking True]" + whole)
    assert learned == loss
    assert [text for text, _ in others] == [whole] * 3


@table(
    ("row", "column", "says"),
    [
        (CHAT | {"chat_template_kwargs": "fast"}, "chat_template_kwargs", "expected an object, got 'fast'"),
        (
            PAIR | {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
            "not used by rows",
        ),
        (CHAT | {"tools": [FUNCTION | {"parameters": "{}"}]}, "tools", "parameters that are text"),
        (CHAT | {"labels": [-100, 2]}, "labels", "[-100, 2]"),
        (TEXT | {"input_ids": [1, 2]}, "input_ids", "[1, 2]"),
        *(
            ({**TEXT, name: value}, name, "not used by rows of strings")
            for name, value in {"system": "S", "tools": [TOOL], "chat_template_kwargs": {"x": 1}}.items()
        ),
        (CHAT | {"images": ["a.png"]}, "images", "a.png"),
        (PAIR | {"label": "False"}, "label", "'False'"),
    ],
)
def test_a_column_that_cannot_act(refusal, row, column, says):
    harmless = {name: value for name, value in row.items() if name != column}
    line = refusal([harmless | {column: None}, row])
    assert f"row 1, column {column!r}" in line
    assert says in line


TURNS = {
    "weight": REPLY | {"weight": 0.0},
    "loss_mask": REPLY | {"loss_mask": "0"},
    "train_detail": REPLY | {"train_detail": [{"begin_offset": 0, "end_offset": 0, "train": False}]},
    "function_call": REPLY | {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
    "images": REPLY | {"images": ["a.png"]},
    "content": REPLY | {"content": [{"type": "text", "value": 5}]},
}


@table("key", TURNS)
def test_keys_of_a_turn_that_would_change_the_training(refusal, key):
    line = refusal([{"messages": [USER, REPLY]}, {"messages": [USER, TURNS[key]]}])
    assert "row 1, column 'messages': turn 1 (assistant)" in line
    assert key in line


def test_times_have_no_json(refusal):
    moment = pa.scalar(0, pa.timestamp("s")).as_py()
    for column, row in (
        ("messages", {"messages": [USER, REPLY | {"at": moment}]}),
        ("tools", CHAT | {"tools": [{"function": {"at": moment}}]}),
    ):
        line = refusal(pa.Table.from_pylist([row]))
        assert f"row 0, column {column!r}: a value that JSON does not have" in line


def test_marks_of_user_turns_that_contradict_the_loss(refusal):
    for mark, flags in ((False, []), (True, ["--train_on_responses_only"])):
        line = refusal([{"messages": [USER | {"train": mark}, REPLY]}], *flags)
        assert "turn 0 (user) has a mark that contradicts the loss of this run" in line
        assert "--train_on_responses_only" in line


# ---- answers that the template does not mark

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LONG = {"messages": [*CHAT["messages"], {"role": "user", "content": "é"}, REPLY | {"content": " é "}]}


# ---- values as they stand


def test_json_columns_of_datasets_are_read_exactly(trained, tmp_path):
    """`datasets` itself reads 0.6 of such a column back as 0.6000000000000001."""
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    rows = [{"messages": [USER, calling({"t": 0.6, "unit": None})]}] * 2
    saved = datasets.Dataset.from_list(rows, features=features).select([1])
    saved.to_parquet(tmp_path / "given.parquet")
    saved.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "given.parquet", tmp_path / "saved"):
        ((text, _),) = trained(path)
        assert '"arguments": {"t": 0.6, "unit": null}' in text


@pytest.mark.parametrize(
    ("rows", "column", "path"),
    [
        ([{"messages": [USER, calling({"unit": None, "x": 1})]}], "messages", "arguments.unit"),
        (
            [CHAT | {"chat_template_kwargs": {"enable_thinking": x}} for x in (True, None)],
            "chat_template_kwargs",
            "enable_thinking",
        ),
    ],
)
def test_a_null_that_parquet_cannot_tell_from_an_absent_key(refusal, rows, column, path):
    line = refusal(pa.Table.from_pylist(rows))
    assert f"row {len(rows) - 1}, column {column!r}: " in line
    assert f"{path} is null, as a struct column also holds keys that are absent" in line


def test_parquet_files_whose_numbers_differ_in_type(refusal, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, number in (("a", 1), ("b", 1.5)):
        table = pa.Table.from_pylist([{"messages": [USER, calling({"x": number})]}])
        pq.write_table(table, folder / f"{name}.parquet")
    assert "Unable to merge" in refusal(folder)


# ---- columns of other trainings, and of other tools


PICTURE = {"bytes": b"\x89PNG", "path": None}


def test_media_of_datasets(refusal, tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    rows = datasets.Dataset.from_list([{"text": "a cat", "picture": PICTURE}], features=features)
    rows.to_parquet(tmp_path / "images.parquet")
    assert "row 0, column 'picture': images, video or sound" in refusal(tmp_path / "images.parquet")


def test_tools_and_a_system_prompt_beside_pairs(trained):
    rows = [ALPACA, CHAT_PAIR]
    for row in rows:
        ((text, loss),) = trained([row | {"tools": [{"type": "function", "function": {}}], "system": "S"}])
        assert text == '[{"type": "function", "function": {}}][system]S[user]q[assistant]a<eos>'
        assert loss == "a<eos>"


# ---- keys of a turn


def test_marks_of_turns_that_agree_with_the_loss(trained):
    turns = [USER | {"train": False, "weight": 0}, REPLY | {"train": True, "weight": 1, "loss": None}]
    assert trained([{"messages": turns}], "--train_on_responses_only")[0][1] == "a<eos>"
    turns = [USER | {"train": True}, REPLY | {"train_detail": None, "images": [], "function_call": None}]
    assert trained([{"messages": turns}])[0][1] == "[user]q[assistant]a<eos>"


def test_what_only_counts_tokens_reads_marks_of_user_turns(telling, tmp_path, capsys):
    row = json.dumps({"messages": [USER | {"train": False}, REPLY]})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
    assert main(["stats", "--dataset", str(tmp_path / "rows.jsonl"), "--model_name", str(telling)]) == 0
    assert capsys.readouterr().out


CALLS = {  # what templates write of the arguments of a call
    "objects": "{{ call.function.arguments | tojson }}",
    "text": "{{ '```' + call.function.arguments + '```' }}",
    "plain": "{{ call.function.arguments }}",
    "either": "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}",
}


@pytest.mark.parametrize(
    ("name", "of_text", "of_object"),
    [
        ("objects", '{"x": "é"}', '{"x": "é"}'),
        ("text", '```{"x":"é"}```', '```{"x": "é"}```'),
        ("plain", '{"x":"é"}', '{"x": "é"}'),
        ("either", '{"x":"é"}', '{"x": "é"}'),
    ],
)
def test_arguments_of_calls_come_as_the_template_reads_them(trained, tmp_path, name, of_text, of_object):
    """OpenAI writes them as JSON text, others as objects."""
    template = TELLING_TEMPLATE.replace("{{ call | tojson }}", CALLS[name])
    model = save_model(tmp_path / "model", chat_template=template, max_position_embeddings=4096)
    turns = [calling(arguments) for arguments in ('{"x":"é"}', {"x": "é"})]
    rows = [{"prompt": [USER, turn, USER], "completion": [turn]} for turn in turns]
    learned = [loss for _, loss in trained(rows, f"--model_name={model}", "--train_on_responses_only")]
    assert learned == [of_text + "<eos>", of_object + "<eos>"]


def test_arguments_of_calls_that_are_no_object(refusal):
    arguments = "[1]"
    line = refusal([CHAT, {"messages": [USER, calling(arguments)]}])
    assert "row 1, column 'tool_calls': arguments that are no JSON object" in line


# ---- no column is passed over in silence


def test_tools_and_calls_that_a_template_does_not_show(refusal, trained, tmp_path):
    """The model would learn calls of tools that it was never told of, or an empty answer in their place."""
    deaf = save_model(tmp_path / "deaf", max_position_embeddings=4096)
    line = refusal([CHAT, CHAT | {"tools": [TOOL]}], f"--model_name={deaf}")
    assert "row 1, column 'tools': the chat template does not show them" in line
    assert line.endswith("; use another model, or give --columns tools=")
    assert len(trained([CHAT, CHAT | {"tools": [TOOL]}], f"--model_name={deaf}", "--columns=tools=")) == 2
    assert len(trained([CHAT, CHAT | {"tools": []}], f"--model_name={deaf}")) == 2
    template = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}"
    deaf = save_model(tmp_path / "concatenates", chat_template=template, max_position_embeddings=4096)
    line = refusal([{"messages": [USER, calling({}) | {"content": None}]}], f"--model_name={deaf}")
    assert "row 0, column 'tool_calls': the chat template does not show them" in line


@table(
    ("row", "name", "value"),
    [
        (TEXT, "rejected", "b"),
        (TEXT, "sample_weight", 0.5),
        (PAIR, "kto_tag", False),
        (ALPACA, "history", [["q", "a"]]),
        (CHAT, "functions", [FUNCTION]),
        (SHARE, "train_on_inputs", True),
        (CHAT, "objects", {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}),
        (CHAT, "enable_thinking", False),
        (CHAT, "mask", "User"),
    ],
)
def test_one_column_that_acts_on_conversations_elsewhere(refusal, trained, row, name, value):
    line = refusal([row | {name: value}])
    assert f"row 0, column {name!r}" in line
    said = line.partition("row 0, ")  # behind the path of the file
    assert len("".join(said[1:])) <= 120 or name in ("functions", "objects")  # two ways out
    assert line.endswith(f"--columns {name}=")
    assert len(trained([row | {name: value}], f"--columns={name}=")) == 1


@table(
    ("row", "text"),
    [
        (PAIR | {"label": True, "images": []}, "qa<eos>"),
        (TEXT | {"label": 0}, "t<eos>"),
        (
            CHAT | {"weight": 1, "parallel_tool_calls": True, "functions": [], "labels": None},
            "[user]q[assistant]a<eos>",
        ),
        (SHARE | {"tools": "[]", "system": "", "kto_tag": True, "images": []}, "[user]q[assistant]a<eos>"),
    ],
)
def test_columns_that_say_nothing_of_the_training(trained, row, text):
    assert trained([row])[0][0] == text


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        (CHAT | {"objects": {"ref": [], "bbox": []}, "enable_thinking": None}, "objects, enable_thinking"),
    ],
)
@pytest.mark.parametrize("name", ["pack", "stats"])
def test_other_columns_are_named(packing, capsys, name, row, unused):
    given = packing([row, row], *(["--out=packs"] if name == "pack" else []))
    given = [name, *(part for part in given[1:] if name == "pack" or "max_seq_length" not in part)]
    assert main(given) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f": {unused} " in shown
    assert shown.count("not used") == 1
