"""`teach`: packs with a teacher's most likely next tokens, as the untouched teacher predicts them."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from cli_runs import plain, read_metrics, tree
from transformers import AutoTokenizer

from unsloth_pack.cli import main
from unsloth_pack.data import tokenizer_hash
from unsloth_pack.demo import BUNDLED_MODELS, TRAIN_FILE
from unsloth_pack.kernels import TeacherHead, TopLogProbs, linear_distillation
from unsloth_pack.packing import read_packs
from unsloth_pack.training.token_columns import TokenColumnCollator
from unsloth_pack.training.trl_setup import row_collator

K, V = 8, 960
DEMO = BUNDLED_MODELS["demo"]


def teach(out, *more):
    flags = ["--sample_limit=40", "--max_seq_length=144", "--dtype=float32", f"--out={out}"]
    return ["teach", *flags, *more]


def read(folder):
    return read_packs(folder, tokenizer_hash(AutoTokenizer.from_pretrained(DEMO)), reads_teacher=True)


@torch.no_grad()
def predictions(model, row):
    """Of each document alone, by transformers: the log-probabilities `[N, V]` of next tokens, and labels."""
    ends = np.cumsum([0, *row["seq_lengths"]])
    log_probs, labels = [], []
    for begin, end in pairwise(ends):
        ids = torch.tensor([row["input_ids"][begin:end]])
        log_probs.append(model(input_ids=ids).logits[0].log_softmax(-1))
        labels += [*row["labels"][begin + 1 : end], -100]
    return torch.cat(log_probs), torch.tensor(labels)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Without a chat template, so that the first token of a document is a label too."""
    rows = map(json.loads, TRAIN_FILE.read_text().splitlines()[:40])
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{row['input']} {row['output']}"}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def packs(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught") / "packs"
    assert main(teach(folder, f"--dataset={texts}", f"--top_k={K}")) == 0
    return folder


def test_each_document_has_the_teachers_top_k_alone(packs):
    manifest, rows = read(packs)
    teacher = plain(DEMO)
    assert (manifest.teacher.model_name, manifest.teacher.top_k) == ("demo", K)
    n_known = 0
    for row in rows:
        log_probs, labels = predictions(teacher, row)
        known = labels != -100
        ids = torch.from_numpy(row["teacher_ids"]).view(-1, K)
        stored = torch.from_numpy(row["teacher_log_probs"]).view(-1, K)
        assert (stored[~known] == -torch.inf).all()
        expected = log_probs[known].topk(K).values
        rounding = expected.abs() * 2.0**-11 + 2e-5
        assert ((stored[known] - expected).abs() <= rounding).all()
        assert ((log_probs[known].gather(1, ids[known]) - expected).abs() <= 2e-5).all()
        n_known += int(known.sum())
    assert n_known == manifest.ledger.tokens_counted > 100


def test_a_temperature(tmp_path):
    assert main(teach("packs", f"--top_k={K}", "--temperature=2.5")) == 0
    manifest, rows = read(tmp_path / "packs")
    assert manifest.teacher.temperature == 2.5
    log_probs, labels = predictions(plain(DEMO), rows[0])
    expected = (log_probs / 2.5).log_softmax(-1).topk(K).values[labels != -100]
    stored = torch.from_numpy(rows[0]["teacher_log_probs"]).view(-1, K)[labels != -100]
    torch.testing.assert_close(stored, expected, atol=1e-5, rtol=2.0**-11)


def test_two_runs_write_the_same_and_nothing_is_overwritten(packs, texts, tmp_path, capsys):
    command = teach(tmp_path / "packs", f"--dataset={texts}", f"--top_k={K}")
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["teacher"] == {"model_name": "demo", "top_k": K, "temperature": 1.0}
    for path in packs.iterdir():
        assert (tmp_path / "packs" / path.name).read_bytes() == path.read_bytes()
    before = tree(tmp_path)
    assert main(command) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_stored_teacher_of_all_tokens_teaches_as_a_live_one(tmp_path):
    """A student of other weights: loss, and the gradient of its hidden states, up to float16."""
    assert main(teach("packs", f"--top_k={V}")) == 0
    rows = read(tmp_path / "packs")[1]
    batch = TokenColumnCollator(row_collator())([rows[0], rows[1]])
    N = batch["input_ids"].shape[1]
    assert batch["teacher_ids"].shape == batch["teacher_log_probs"].shape == (1, N, V)
    assert (batch["teacher_ids"].dtype, batch["teacher_log_probs"].dtype) == (torch.int32, torch.float16)
    stored = TopLogProbs(batch["teacher_ids"], batch["teacher_log_probs"])
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)

    teacher, student = plain(DEMO), plain(DEMO)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
        run = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        hidden, of_teacher = (x.get_decoder()(**run).last_hidden_state for x in (student, teacher))
    live = TeacherHead(of_teacher, teacher.lm_head.weight.detach())
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        losses, gradients = [], []
        for each in (stored, live):
            leaf = hidden.clone().requires_grad_()
            weight = student.lm_head.weight.detach()
            results = linear_distillation(leaf, weight, labels, each, divergence=divergence)
            losses.append(results.loss.detach())
            gradients.append(torch.autograd.grad(results.loss, leaf)[0])
        assert losses[1] > 0.1
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
        assert (gradients[0] - gradients[1]).norm() <= 5e-3 * gradients[1].norm()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top_k=961"], "top_k is 961; give a whole number from 1 to 960"),
        (["--top_k=0"], "top_k is '0'; it should be greater than or equal to 1"),
        (["--temperature=0"], "temperature is '0'; it should be greater than 0"),
    ],
)
def test_bad_input(flags, message, refused):
    assert message in refused(command=teach("new", *flags))


def test_images_and_packs_are_refused(place, packs, refused):
    command = teach("new", f"--model_name={place / 'model'}", f"--dataset={place / 'rows.jsonl'}")
    assert "the data has images, and a teacher reads text alone; take them out" in refused(command=command)
    command = teach("new", f"--dataset={packs}")
    assert "packed rows, but documents are needed here" in refused(command=command)


def test_a_student_of_fewer_outputs(packs, tmp_path, refused):
    """Refused where the teacher's tokens are beyond them, though those of the data are not."""
    rows = read(packs)[1]
    largest = int(max(row["teacher_ids"].max() for row in rows))
    assert largest > max(max(row["input_ids"]) for row in rows)
    model = plain(DEMO)
    model.resize_token_embeddings(largest)
    model.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "small")
    flags = {"objective": "distill", "teacher": "stored", "dataset": packs, "model_name": "small"}
    assert f"column 'teacher_ids': token id {largest} is outside the vocabulary" in refused(**flags)


def test_a_teacher_that_leaks_teaches_nothing(leak, tmp_path, capsys):
    assert main(teach("packs")) == 1
    assert "documents of a packed row see each other" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_teacher_whose_logits_overflow(refused, monkeypatch):
    """In rows of the data, not in that of the probe."""

    def spoil(model):
        torch.nn.init.constant_(model.get_decoder().norm.weight, 3e38)

    monkeypatch.setattr("unsloth_pack.run.teacher.probe", spoil)
    message = "demo gives probabilities that are no numbers; give --dtype float32"
    assert message in refused(command=teach("packs"))


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A model that has the teacher's tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("student")
    model = plain(DEMO)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


@pytest.fixture
def distil(student, tmp_path):
    def run(dataset, out, *more):
        flags = ["--objective=distill", f"--model_name={student}", "--dtype=float32", "--max_steps=3"]
        flags += ["--learning_rate=0.01", "--logging_steps=1", "--kl_weight=1", "--ce_weight=0.5"]
        return main([*flags, f"--dataset={dataset}", f"--output_dir={tmp_path / out}", *more])

    return run


def log_of(folder, name):
    return [line[name] for line in read_metrics(folder)["log"] if name in line]


def test_a_run_learns_from_a_stored_teacher_as_from_a_live_one(texts, distil, tmp_path, capsys, monkeypatch):
    """All tokens are stored, at the temperature of the packs, two rows a step; evaluation too."""
    monkeypatch.setenv("COLUMNS", "150")
    assert main(teach("packs", f"--dataset={texts}", f"--top_k={V}", "--temperature=1.5")) == 0
    command = "--objective distill --teacher stored --model_name STUDENT --dataset packs"
    assert command in capsys.readouterr().out
    packed = ["--max_seq_length=144", "--per_device_train_batch_size=2", "--eval_steps=3"]
    stored = [*packed, "--teacher=stored", "--eval_dataset=packs"]
    live = [*packed, "--teacher=demo", f"--eval_dataset={texts}", "--sample_packing", "--temperature=1.5"]
    assert distil("packs", "stored", *stored) == 0
    assert distil(texts, "live", *live) == 0
    for name in ("loss", "kl_loss", "sft_loss", "eval_loss", "eval_kl_loss", "grad_norm"):
        ours, theirs = (log_of(tmp_path / folder, name) for folder in ("stored", "live"))
        assert len(ours) >= 1
        assert ours == pytest.approx(theirs, rel=2e-3), name
    assert log_of(tmp_path / "stored", "kl_loss")[-1] < 0.9 * log_of(tmp_path / "stored", "kl_loss")[0]


def test_a_student_goes_on_after_an_interruption(packs, distil, tmp_path):
    more = ["--teacher=stored", "--save_steps=2", "--lora_dropout=0.2"]
    assert distil(packs, "whole", *more) == 0
    assert distil(packs, "out", *more) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    assert main(["--resume", f"--output_dir={tmp_path / 'out'}"]) == 0
    assert log_of(tmp_path / "out", "kl_loss") == log_of(tmp_path / "whole", "kl_loss")


def test_taught_packs_train_without_their_teacher(packs, texts, student, tmp_path):
    flags = [f"--model_name={student}", "--dtype=float32", "--max_steps=1", "--max_seq_length=144"]
    assert main([*flags, f"--dataset={packs}", f"--output_dir={tmp_path / 'taught'}"]) == 0
    plain = ["--sample_packing", f"--dataset={texts}", f"--output_dir={tmp_path / 'plain'}"]
    assert main([*flags, *plain]) == 0
    assert log_of(tmp_path / "taught", "loss") == log_of(tmp_path / "plain", "loss")


def test_what_a_stored_teacher_cannot_teach(packs, texts, distil, tmp_path, capsys):
    assert main(["pack", "--sample_limit=40", "--max_seq_length=144", "--out=untaught"]) == 0
    stored, none = "--teacher=stored", "holds none; give packs that `unsloth-pack teach` wrote"
    cases = [
        ([texts, stored], f"teacher is 'stored', and dataset {texts} {none}"),
        (["untaught", stored], f"teacher is 'stored', and dataset untaught {none}"),
        (
            [packs, stored, "--eval_dataset=untaught"],
            f"teacher is 'stored', and eval_dataset untaught {none}",
        ),
        ([packs, stored, "--temperature=2"], "temperature is 2.0, but 1.0 for the packed rows in"),
    ]
    before = tree(tmp_path)
    capsys.readouterr()
    for (dataset, *flags), message in cases:
        assert distil(dataset, "out", *flags) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert tree(tmp_path) == before


def test_a_student_of_another_vocabulary(packs, model, refused):
    """Its tokenizer differs."""
    flags = {"objective": "distill", "teacher": "stored", "dataset": packs, "max_seq_length": 144}
    assert "packed with another tokenizer, that of demo" in refused(model_name=model, **flags)
