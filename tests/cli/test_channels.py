"""The loss of each data set of a mixture: their mean over labels is the loss, however rows are batched."""

import json
from types import SimpleNamespace

import pytest
import torch
from cli_runs import cut_after, read_metrics
from device_reads import counted_reads
from warm import torchrun

from unsloth_pack.cli import main
from unsloth_pack.data.mixture import short_names
from unsloth_pack.training.document_losses import ChannelLosses


@pytest.fixture
def mixture(rows, tmp_path):
    """Two data sets, in letters of their own."""
    for name, letter, some in (("math", "c", rows[:6]), ("code", "d", rows[20:26])):
        text = json.dumps(
            [{column: each.replace("a", letter) for column, each in row.items()} for row in some]
        )
        (tmp_path / f"{name}.json").write_text(text)
    return json.dumps(["math.json", "code.json"])


def logged(folder, name="loss"):
    """The loss and those of the data sets, of each line."""
    lines = [line for line in read_metrics(folder)["log"] if name in line]
    assert lines
    return [{key: line[key] for key in line if key.split("/")[0] == name} for line in lines]


BATCHES = [
    {"sample_packing": True, "per_device_train_batch_size": 2},
    {"padding_free": True, "per_device_train_batch_size": 3},
    {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3},
]


def test_each_data_set_has_the_loss_of_a_run_on_it_alone(train, mixture, tmp_path):
    """The first update sees all documents, before anything is learned."""
    given = {"max_steps": 1, "gradient_accumulation_steps": 12, "num_train_epochs": 1}
    alone = {}
    for name in ("math", "code"):
        assert train(dataset=f"{name}.json", sample_packing=True, output_dir=name, **given) == 0
        ((_, alone[f"loss/{name}"]),) = [*zip("l", logged(tmp_path / name)[0].values(), strict=True)]
    for number, how in enumerate(BATCHES):
        out = tmp_path / f"both{number}"
        assert train(dataset=mixture, output_dir=out, **given, **how) == 0
        (seen,) = logged(out)
        assert min(alone.values()) < seen.pop("loss") < max(alone.values())
        assert seen == pytest.approx(alone, rel=1e-5)


def test_an_evaluation_has_them_in_the_same_way(train, mixture, tmp_path):
    """Of documents that are held out, and of data sets of its own."""
    seen = []
    for number, how in enumerate(BATCHES):
        out = tmp_path / f"out{number}"
        assert train(dataset=mixture, eval_fraction=0.5, output_dir=out, max_steps=1, **how) == 0
        seen.append(logged(out, "eval_loss")[0])
    assert seen[0].keys() == {"eval_loss", "eval_loss/math", "eval_loss/code"}
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    assert seen[2] == pytest.approx(seen[0], rel=1e-5)
    assert train(eval_dataset=mixture, max_steps=1) == 0
    assert logged(tmp_path / "out", "eval_loss")[0].keys() == seen[0].keys()
    assert logged(tmp_path / "out")[0].keys() == {"loss"}


def test_a_stream_that_is_resumed_goes_on_with_them(train, mixture, tmp_path):
    flags = {"dataset": mixture, "mixture": "interleave_over", "max_steps": 4, "num_proc": 1}
    assert train("--streaming", **flags, save_steps=2, output_dir=tmp_path / "one") == 0
    before = logged(tmp_path / "one")
    assert {name for line in before for name in line} == {"loss", "loss/math", "loss/code"}
    cut_after(tmp_path / "one", 2)
    assert main(["train", "--resume", f"--output_dir={tmp_path / 'one'}"]) == 0
    assert logged(tmp_path / "one") == before


@pytest.mark.parametrize("position_ids", [None, [[0, 1, 2, 3, 0, 1, 2, 3]]], ids=["padded", "packed"])
def test_no_step_waits_for_them(position_ids):
    shape = (2, 4) if position_ids is None else (1, 8)
    outputs = SimpleNamespace(log_probs=-torch.ones(shape)[:, 1:], label_mask=torch.ones(shape)[:, 1:].bool())
    losses = ChannelLosses(["math", "code"])
    losses.channel = torch.tensor([1, 0])
    described = None if position_ids is None else torch.tensor(position_ids)
    with counted_reads() as places:
        sums = losses.sums(outputs, described)
    assert places == []
    of_math, of_code = (3, 3) if position_ids is None else (3, 4)
    assert [int(x) for x in sums] == [of_math, of_code] * 2


def test_two_processes_log_those_of_one(train, model, mixture, tmp_path):
    flags = {"dataset": mixture, "eval_fraction": 0.5, "max_steps": 2, "logging_steps": 2}
    flags |= {"learning_rate": 0.01, "max_seq_length": 128, "max_token_loss": 1}
    given = {"model_name": model, "output_dir": tmp_path / "two", "gradient_accumulation_steps": 1}
    done = torchrun(2, "--sample_packing", **flags | given)
    assert done.returncode == 0, done.stderr
    assert train("--sample_packing", **flags, gradient_accumulation_steps=2) == 0
    for name in ("loss", "eval_loss"):
        one, two = (logged(tmp_path / out, name) for out in ("out", "two"))
        assert [*one[-1]] == [*two[-1]] == [name, f"{name}/math", f"{name}/code"]
        assert two == [pytest.approx(each, rel=1e-4) for each in one]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["data/math.jsonl.gz", "org/chat-v1.5"], ("math", "chat-v1.5")),
        (["math/rows.json", "code/rows.json"], ("math_rows", "code_rows")),
        (["org/set (train)", "org/set (test)"], ("set_train", "set_test")),
        (["a.json", "a.json"], ("a-1", "a-2")),
        (["/x/a.json", "/y/a.txt"], ("x_a", "y_a")),
    ],
)
def test_names_in_logs_are_short_and_differ(names, short):
    assert short_names(names) == short
