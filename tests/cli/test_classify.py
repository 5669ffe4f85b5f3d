"""`unsloth-pack train --task classify`: labels of documents are learned on packed rows."""

import json
import random
import shutil

import datasets
import numpy as np
import pytest
import torch
from cli_runs import cut_after, losses, read_metrics
from model_folder import byte_tokenizer
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main
from unsloth_pack.data.labels import Labels
from unsloth_pack.data.tokenize import documents_of
from unsloth_pack.errors import InputError

LETTERS = {"animal": "abc", "plant": "mno", "stone": "xyz"}


def labelled(n, seed):
    """Texts whose letters tell their class."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        label = rng.choice([*LETTERS])
        letters = rng.choices(LETTERS[label] + "-", k=rng.randint(2, 30))
        rows.append({"text": "".join(letters), "kind": label})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    for name, rows in (("train", labelled(200, 0)), ("eval", labelled(60, 1))):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def classify(train, files):
    def run(*arguments, **flags):
        flags = {"dataset": files / "train.jsonl", "label_column": "kind", "task": "classify"} | flags
        flags = {"per_device_train_batch_size": 1, "learning_rate": 0.01, "max_steps": 30} | flags
        return train(*arguments, **flags)

    return run


def accuracies(folder):
    return [line["eval_accuracy"] for line in read_metrics(folder)["log"] if "eval_accuracy" in line]


@torch.no_grad()
def classes_of(model, tokenizer, rows, names):
    inputs = (tokenizer(row["text"], return_tensors="pt") for row in rows)
    return [names[int(model.eval()(**each).logits.argmax())] for each in inputs]


def test_classes_are_learned_and_transformers_finds_them_again(classify, model, files, tmp_path, capsys):
    out, rows = tmp_path / "out", labelled(60, 1)
    model = shutil.copytree(model, tmp_path / "base")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"pad_token_id": None}))
    flags = {"model_name": model, "eval_dataset": files / "eval.jsonl"}
    assert classify("--packing", "--save_model", "--verbose", **flags) == 0
    shown = capsys.readouterr().out
    assert "one for each document" in shown
    assert "report.html was not written" not in shown
    assert accuracies(out)[-1] > 0.9  # a third by chance
    config, tokenizer = AutoConfig.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert [*config.id2label.values()] == [*LETTERS]
    kind = AutoModelForSequenceClassification
    base = kind.from_pretrained(model, config=config, dtype=torch.float32)
    found = classes_of(PeftModel.from_pretrained(base, out), tokenizer, rows, config.id2label)
    share = sum(name == row["kind"] for name, row in zip(found, rows, strict=True)) / len(rows)
    assert share == pytest.approx(accuracies(out)[-1])
    ours, _ = FastLanguageModel.from_pretrained(str(out), 128, torch.float32)
    assert classes_of(ours, tokenizer, rows, config.id2label) == found
    assert ours.config.pad_token_id == config.pad_token_id is not None
    merged = kind.from_pretrained(out / "merged", dtype=torch.float32)
    assert main(["merge", f"--model_name={out}", f"--save_path={tmp_path / 'again'}"]) == 0
    again, first = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "again", out / "merged")
    )
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert main(["generate", f"--model_name={out}", "--prompt=a"]) == 2
    assert "classifies texts and writes none" in capsys.readouterr().err
    same = zip(classes_of(merged, tokenizer, rows, merged.config.id2label), found, strict=True)
    assert sum(one == other for one, other in same) >= 58  # in bfloat16


def test_packed_or_not_evaluates_alike(classify, tmp_path):
    """Whole numbers are classes too, and every weight may train."""
    rows = [row | {"kind": [*LETTERS].index(row["kind"]) * 5} for row in labelled(40, 2)]
    numbered = tmp_path / "numbered.json"
    numbered.write_text(json.dumps(rows))
    flags = {"dataset": numbered, "eval_dataset": numbered, "max_steps": 2, "learning_rate": 1e-9}
    seen = []
    for packing in ("--packing", "--padding_free"):
        out = tmp_path / packing
        how = {"eval_packing": True, "per_device_eval_batch_size": 2} if packing == "--packing" else {}
        assert classify(packing, output_dir=out, tuning="full", **how, **flags) == 0
        lines = [line for line in read_metrics(out)["log"] if "eval_loss" in line]
        seen.append((lines[0]["eval_loss"], lines[0]["eval_accuracy"]))
        assert [*AutoConfig.from_pretrained(out).id2label.values()] == ["0", "5", "10"]
    torch.testing.assert_close(torch.tensor(seen[0]), torch.tensor(seen[1]))


def test_a_killed_run_goes_on_and_another_takes_its_folder(classify, files, tmp_path):
    out, flags = tmp_path / "out", {"eval_fraction": 0.2, "max_steps": 6, "save_steps": 2}
    assert classify("--packing", **flags) == 0
    whole = losses(out), accuracies(out)
    cut_after(out, 4)
    assert classify("--packing", "--resume", **flags) == 0
    assert (losses(out), accuracies(out)) == whole
    assert classify("--packing", "--overwrite_output_dir", **flags) == 0
    assert (losses(out), accuracies(out)) == whole


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"label_column": None}, "no column 'label' among text, kind; give --label_column"),
        ({"task": None}, "label_column is 'kind', which needs another option; give --task too"),
        (
            {"objective": "distill"},
            "task is 'classify' and objective is 'distill', which needs the whole LM head",
        ),
        ({"streaming": True}, "task is 'classify' and streaming is true; give one of them"),
        ({"model_name": "vision-demo"}, "has no classifier in transformers; give another"),
    ],
)
def test_what_cannot_be_classified_is_refused_in_one_line(flags, message, classify, capsys):
    assert classify("--packing", **flags) == 2
    assert message in capsys.readouterr().err


def test_texts_are_encoded_as_the_tokenizer_alone_does():
    """So they are when the model classifies: without an EOS. The class stands at the last token."""
    tokenizer, texts = byte_tokenizer(), ["ab", "c" * 9, " ", "d", "efg"] * 204  # two batches
    classes = np.arange(len(texts), dtype=np.int32) % 7
    rows = datasets.Dataset.from_dict({"text": texts})
    found = documents_of(rows, tokenizer, max_length=6, classes=classes)
    expected = [
        {"input_ids": ids, "labels": [*[-100] * (len(ids) - 1), int(label)]}
        for text, label in zip(texts, classes, strict=True)
        if text.strip()
        for ids in [tokenizer(text)["input_ids"][:6]]
    ]
    assert found.rows.to_list() == expected
    ledger = found.ledger
    assert (ledger.tokens_counted, ledger.rows_fully_masked, ledger.rows_truncated) == (816, 204, 204)
    chats = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(InputError, match="task classify reads a column text, and the rows are messages"):
        documents_of(chats, tokenizer, max_length=6, classes=classes[:1])


def rows_of(labels, feature=None):
    rows = datasets.Dataset.from_dict({"text": ["a"] * len(labels), "label": labels})
    return rows if feature is None else rows.cast_column("label", feature)


def test_classes_of_a_column():
    found = Labels.of("label", [("a", rows_of([10, 2, 2])), ("a", rows_of(["no", "3"]))])
    assert found.names == ("2", "3", "10", "no")
    assert found.numbers(rows_of(["no", "2"])).tolist() == [3, 0]
    feature = datasets.ClassLabel(names=["low", "high", "none"])
    found = Labels.of("label", [("a", rows_of([1, 0], feature))])
    assert found.names == ("low", "high", "none")
    assert found.numbers(rows_of([1, 2], feature)).tolist() == [1, 2]
    with pytest.raises(InputError, match="row 1, column 'label': not in the training data, got 'other'"):
        found.numbers(rows_of(["high", "other"]))
    for labels, message in (
        (["a", None, "b"], "a: row 1, column 'label': no class, got None; give whole numbers or names"),
        (["a", "b", ""], "a: row 2, column 'label': no class, got ''; give whole numbers or names"),
        ([0.5, 1.0], "row 0, column 'label': no class, got 0.5; give whole numbers or names"),
        (["a", "a"], "label_column 'label' holds 1 label; give data with two or more"),
    ):
        with pytest.raises(InputError, match=message):
            Labels.of("label", [("a", rows_of(labels))])
