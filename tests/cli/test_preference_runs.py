"""`unsloth-pack --objective dpo`, `kto` and `orpo` from end to end on a tiny model."""

import json
import shutil
from pathlib import Path

import pytest
from cli_runs import cut_after, read_metrics
from command_options import read_options
from tables import table

from unsloth_pack.cli import main
from unsloth_pack.run.contradictions import contradictions

FLAGS = {"max_steps": 8, "learning_rate": 0.01, "logging_steps": 1, "max_seq_length": 256}
PAIRED = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/rejected")


@pytest.fixture
def pairs(rows, tmp_path):
    """Answers that repeat the prompt, or are in other letters; text, and conversations with their prompts."""
    both = [(row["instruction"], row["output"], "yz" * len(row["instruction"])) for row in rows]
    text = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in both]
    chats = [{name: turns(row["prompt"], row[name]) for name in ("chosen", "rejected")} for row in text]
    for row, chat in zip(text, chats, strict=True):  # as UltraFeedback has them
        chat |= {"prompt": row["prompt"], "messages": chat["chosen"]}
    good = [
        {"prompt": p, "completion": c if i % 2 else r, "label": i % 2} for i, (p, c, r) in enumerate(both)
    ]
    return {name: write(tmp_path / f"{name}.json", each) for name, each in (
        ("text", text), ("chats", chats), ("labelled", good), ("few", text[:7]))}  # fmt: skip


def turns(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def write(path, rows):
    path.write_text(json.dumps(rows))
    return str(path)


def log_of(folder, name="loss"):
    return [line for line in read_metrics(folder)["log"] if name in line]


@pytest.mark.draws
@pytest.mark.parametrize(("flags", "data", "names"), [
    ({"objective": "dpo", "loss_type": "robust", "label_smoothing": 0.1}, "text", PAIRED),
    ({"objective": "dpo", "beta": 0.5}, "chats", PAIRED),
    ({"objective": "orpo"}, "chats", (*PAIRED, "nll_loss", "log_odds_ratio")),
    ({"objective": "kto", "undesirable_weight": 0.5}, "labelled", ("rewards/margins", "kl")),
])  # fmt: skip
def test_the_better_answers_become_likelier(flags, data, names, train, pairs, tmp_path):
    flags = FLAGS | flags | {"dataset": pairs[data], "eval_fraction": 0.2, "eval_steps": 4}
    assert train("--sample_packing", **flags) == 0
    trained, evaluated = log_of(tmp_path / "out"), log_of(tmp_path / "out", "eval_loss")
    assert {*names} <= {name for line in trained for name in line}
    assert {f"eval_{name}" for name in names} <= {*evaluated[-1]}
    if flags["objective"] != "orpo":  # before the first update the model is its reference
        assert {value for name, value in trained[0].items() if "rewards" in name} == {0}
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert evaluated[-1]["eval_rewards/margins"] > evaluated[0]["eval_rewards/margins"]
    assert "reward of the better answer" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_answers_that_are_too_long_are_dropped_and_counted(objective, train, tmp_path, capsys):
    row = PAIR if objective == "dpo" else LABELLED
    others, seen = [row, row | {"prompt": "pq"}], []
    for name, rows in (("with", [*others, row | {"prompt": "q" * 300}]), ("without", others)):
        flags = {"dataset": write(tmp_path / f"{name}.json", rows), "output_dir": tmp_path / name}
        flags |= {"objective": objective, "max_token_loss": 1, "max_steps": 2}
        assert train("--sample_packing", **FLAGS | flags) == 0
        seen.append([line["loss"] for line in log_of(tmp_path / name)])
    assert "of 1 rows" in capsys.readouterr().out
    assert seen[0] == seen[1]


def test_labels_of_feedback_may_be_text_as_in_csv(train, pairs, tmp_path):
    rows = json.loads(Path(pairs["labelled"]).read_text())
    lines = [f"{row['prompt']},{row['completion']},{bool(row['label'])}" for row in rows]
    (tmp_path / "labelled.csv").write_text("\n".join(["prompt,completion,label", *lines]))
    seen = []
    for data in (pairs["labelled"], tmp_path / "labelled.csv"):
        flags = FLAGS | {"dataset": data, "objective": "kto", "max_steps": 2}
        assert train(**flags, output_dir=tmp_path / Path(data).suffix) == 0
        seen.append([line["loss"] for line in log_of(tmp_path / Path(data).suffix)])
    assert seen[0] == seen[1]


def test_evaluation_is_the_same_however_pairs_are_batched(train, pairs, tmp_path):
    seen = []
    for packed in (False, True):
        out = tmp_path / str(packed)
        how = {"eval_packing": packed, "per_device_eval_batch_size": 2, "max_steps": 2, "output_dir": out}
        data = {"dataset": pairs["text"], "eval_dataset": pairs["few"], "objective": "orpo"}
        assert train("--sample_packing", **FLAGS | how | data) == 0
        seen.append(log_of(out, "eval_loss")[-1])
    names = [name for name in seen[0] if name.startswith(("eval_rewards", "eval_l", "eval_nll"))]
    assert len(names) == 10
    assert [seen[0][name] for name in names] == pytest.approx([seen[1][name] for name in names], rel=1e-4)


@pytest.mark.parametrize(("objective", "data"), [("dpo", "text"), ("kto", "labelled"), ("orpo", "chats")])
def test_packs_train_as_the_rows_that_they_hold(
    objective, data, model, train, pairs, tmp_path, capsys, monkeypatch
):
    """With and without a stored reference, which an evaluation may have or not; and after an interruption."""
    monkeypatch.setenv("COLUMNS", "150")
    of_packs = [f"--model_name={model}", "--max_seq_length=256", f"--objective={objective}"]
    assert main(["pack", *of_packs, f"--dataset={pairs[data]}", "--out=packs"]) == 0
    assert f"--dataset packs --objective {objective}" in capsys.readouterr().out
    datasets = {"rows": pairs[data], "packs": "packs"}
    if objective != "orpo":
        flags = [*of_packs, "--dtype=float32", f"--dataset={pairs[data]}", "--out=taught"]
        assert main(["teach", *flags]) == 0
        datasets["taught"] = "taught"
    seen = {}
    for name, dataset in datasets.items():
        evaluated = "taught" if name == "taught" and objective == "dpo" else "packs"
        more = {"dataset": dataset, "eval_dataset": evaluated, "output_dir": tmp_path / f"of-{name}"}
        more |= {"objective": objective, "eval_steps": 4, "save_steps": 4, "learning_rate": 1e-3}
        assert train("--sample_packing", **FLAGS | more) == 0
        seen[name] = [*log_of(more["output_dir"]), *log_of(more["output_dir"], "eval_loss")]
    names = [n for n in seen["rows"][-2] if n.startswith(("loss", "rewards", "logps", "kl", "grad_norm"))]
    for lines in seen.values():
        for line, expected in zip(lines[:8], seen["rows"][:8], strict=True):
            assert [line[n] for n in names] == pytest.approx([expected[n] for n in names], rel=1e-4, abs=1e-5)
    out = more["output_dir"]
    cut_after(out, 4)
    assert main(["--resume", f"--output_dir={out}"]) == 0
    again = [*log_of(out), *log_of(out, "eval_loss")]
    assert [line["loss"] for line in again[:8]] == [line["loss"] for line in seen[name][:8]]


def test_packs_of_another_objective_or_reference_are_refused(model, tied, pairs, refused):
    of_packs = [
        f"--model_name={model}",
        "--max_seq_length=256",
        "--objective=dpo",
        f"--dataset={pairs['few']}",
    ]
    assert main(["teach", *of_packs, "--out=packs"]) == 0
    for objective in ("sft", "kto"):
        said = f"objective is '{objective}', but 'dpo' for the packed rows in packs; give --objective dpo"
        assert said in refused(**FLAGS, dataset="packs", objective=objective)
    said = f"packs holds the reference {model}, and {tied} has other weights; teach the packs by it"
    assert said in refused(**FLAGS, dataset="packs", objective="dpo", model_name=tied)
    said = "top_k is given, and objective 'dpo' has a reference; leave it out"
    assert said in refused(command=["teach", *of_packs, "--out=new", "--top_k=8"])
    said = "objective is 'orpo', which has no reference; use `unsloth-pack pack`"
    assert said in refused(command=["teach", "--objective=orpo", "--out=new"])


@pytest.mark.parametrize("objective", ["dpo", "orpo", "distill"])
def test_a_model_that_adds_a_loss_of_its_routers_is_refused(objective, model, pairs, data, refused, tmp_path):
    folder = shutil.copytree(model, tmp_path / "routed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    rows = data if objective == "distill" else pairs["few"]
    said = (
        "output_router_logits is true in the model's config, and an objective has no loss of routers; set it"
    )
    assert said in refused(**FLAGS, objective=objective, dataset=rows, model_name=folder)


def test_options_of_the_loss_act(train, pairs, tmp_path):
    flags = FLAGS | {"dataset": pairs["text"], "max_steps": 4, "objective": "dpo"}
    ways = {
        "plain": {},
        "beta": {"beta": 0.5},
        "loss_type": {"loss_type": "ipo"},
        "robust": {"loss_type": "robust"},
    }
    ways["smoothed"] = ways["robust"] | {"label_smoothing": 0.3}
    for name, way in ways.items():
        assert train("--sample_packing", **flags | way, output_dir=tmp_path / name) == 0
    seen = {name: log_of(tmp_path / name)[-1]["loss"] for name in ways}
    assert seen["robust"] == pytest.approx(seen["plain"], rel=1e-6)  # nothing is the wrong way round
    del seen["robust"]
    assert len({round(loss, 5) for loss in seen.values()}) == 4


def test_an_adapter_that_trains_on_is_compared_with_itself(train, pairs, tmp_path):
    flags = FLAGS | {"dataset": pairs["text"], "objective": "dpo", "save_steps": 4}
    assert train("--sample_packing", **flags) == 0
    second = {"init_adapter": tmp_path / "out", "output_dir": tmp_path / "second", "model_name": None}
    assert train("--sample_packing", **flags | second) == 0
    lines = log_of(tmp_path / "second")
    assert lines[0]["rewards/margins"] == 0
    assert lines[-1]["rewards/margins"] > 0
    cut_after(tmp_path / "second", 4)
    assert main(["--resume", f"--output_dir={tmp_path / 'second'}"]) == 0
    assert [line["loss"] for line in log_of(tmp_path / "second")] == [line["loss"] for line in lines]


def test_all_of_a_model_is_compared_with_a_copy(train, pairs, tmp_path):
    full = {"tuning": "full", "dtype": "float32", "learning_rate": 1e-4}
    assert train(**FLAGS | full | {"dataset": pairs["text"], "objective": "dpo"}) == 0
    first, *_, last = log_of(tmp_path / "out")
    assert first["rewards/margins"] == 0
    assert last["rewards/margins"] > 0


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
LABELLED = {"prompt": "q", "completion": "a", "label": True}


@table("objective, row, said", [
    ("dpo", PAIR | {"rejected": "a"}, "row 1: chosen and rejected are equal; correct or remove the row"),
    ("dpo", PAIR | {"rejected": " "}, "row 1, column 'rejected': expected some text, got ' '"),
    ("dpo", PAIR | {"chosen": None}, "row 1, column 'chosen': expected a string, got None"),
    ("orpo", PAIR | {"chosen": "a" * 300},
     "of its 309 tokens, and --max_token_loss allows 1.00%: 304 beyond --max_seq_length 256"),
    ("kto", LABELLED | {"label": 2}, "row 1, column 'label': expected true or false, got 2"),
    ("kto", LABELLED | {"completion": ""}, "row 1, column 'completion': expected some text"),
])  # fmt: skip
def test_a_row_that_says_nothing_is_refused(objective, row, said, refused, tmp_path):
    good = LABELLED if objective == "kto" else PAIR
    data = write(tmp_path / "bad.json", [good, row])
    assert said in refused(**FLAGS, objective=objective, dataset=data)


@table("objective, row, said", [
    ("kto", {"prompt": "q", "completion": "a"}, "no column label says which answers are good; name it"),
    ("kto", {"text": "a", "label": True}, "'completion' comes without a prompt; give columns prompt"),
    ("kto", PAIR, "columns chosen, rejected are pairs; give --objective dpo or orpo"),
    ("dpo", {"prompt": "q", "completion": "a"}, "columns are prompt, completion; give chosen and rejected"),
    ("dpo", {"chosen": json.dumps(turns("q", "a")), "rejected": json.dumps(turns("q", "b"))},
     "column 'chosen' holds turns as JSON text; write them as a list of objects"),
    ("sft", PAIR, "columns chosen, rejected are preferences; train with --objective dpo, or"),
])  # fmt: skip
def test_columns_of_another_objective_are_refused(objective, row, said, refused, tmp_path):
    assert said in refused(**FLAGS, objective=objective, dataset=write(tmp_path / "bad.json", [row]))


@table("flags, said", [
    (["--beta=0.2"], "beta is 0.2 and objective is 'sft'; give --objective dpo, or leave it out"),
    (["--objective=kto", "--loss_type=ipo"], "loss_type is 'ipo' and objective is 'kto'; give --objective"),
    (["--objective=dpo", "--label_smoothing=0.1"], "give --loss_type robust, or leave it out"),
    (["--objective=dpo", "--streaming", "--max_steps=1"], "streaming is true and objective is 'dpo'; leave"),
    (["--objective=orpo", "--deepspeed=zero2"], "and objective is 'orpo', which needs the whole LM head"),
    (["--objective=kto", "--fsdp=full"], "and objective is 'kto', of which ranks make unequal passes"),
])  # fmt: skip
def test_options_of_another_objective_are_refused(flags, said):
    assert any(said in str(error) for error in contradictions(read_options(flags)))
