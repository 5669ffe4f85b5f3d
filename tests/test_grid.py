"""A part of the correctness grid on this device, and that the grid sees what is planted."""

import copy
import json
import math
import re
import sys

import grid
import pytest
import torch
from correctness import judge as judging
from correctness import models
from correctness.cases import CHECKPOINTING, DTYPES, VARIANTS, WINDOWS, Case, cases
from correctness.judge import Draw, holds, judge
from correctness.measure import measure
from correctness.parts import joined
from correctness.workers import _Worker
from peft.tuners.lora import LoraLayer
from tiny import Outcome

from unsloth_pack.attention import BACKENDS
from unsloth_pack.cuda_graphs.capture import StepOutput
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora import linear as layers
from unsloth_pack.packed_row.row import PackedRow

PART = dict.fromkeys(
    [
        *cases(variant=["plain"], dtype=["bfloat16", "float32"], checkpointing=["False", "True"]),
        *cases(arch=["qwen2", "gemma3_text"], window=["short"], dtype=["bfloat16"], checkpointing=["False"]),
        *cases(arch=["llama"], variant=["plain"], dtype=["float16", "nf4"]),
        *cases(arch=["qwen3_moe"], variant=["plain", "bias"], dtype=["nf4"], checkpointing=["auto"]),
        *cases(
            arch=["gpt_oss"],
            window=["short"],
            variant=["full"],
            dtype=["bfloat16", "float16"],
            backend=["sdpa"],
            checkpointing=["False"],
        ),
        *cases(
            arch=["qwen3_moe", "deepseek_v3"],
            variant=["two stages", "full", "frozen parts", "trained tokens"],
            dtype=["float16"],
            backend=["sdpa"],
            checkpointing=["False"],
        ),
    ]
)
DAILY = (  # of them all variants, dtypes, windows and ways of checkpointing
    ("llama", "none", "plain", "nf4"),
    ("llama", "none", "plain", "float16"),
    ("qwen2", "short", "bias", "bfloat16"),
    ("qwen2", "short", "dropout", "bfloat16"),
    ("qwen2", "short", "rslora", "bfloat16"),
    ("gemma3_text", "short", "dora", "bfloat16"),
    ("gemma3_text", "short", "modules_to_save", "bfloat16"),
    ("gemma4_text", "long", "plain", "float32"),
    ("falcon_h1", "none", "plain", "bfloat16"),
    ("qwen3_moe", "none", "plain", "nf4"),
    ("qwen3_moe", "none", "two stages", "float16"),
    ("deepseek_v3", "none", "full", "float16"),
    ("qwen3_moe", "none", "frozen parts", "float16"),
    ("deepseek_v3", "none", "trained tokens", "float16"),
)


def models_of(part):
    """Cases of one model together, in the order in which they share it."""
    together = {}
    for case in part:
        together.setdefault((case.arch, case.window, case.variant, case.dtype), []).append(case)
    return together


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=[] if m in DAILY else [pytest.mark.nightly]) for m in models_of(PART)],
    ids="-".join,
)
def test_packed_is_as_right_as_each_document_alone(model):
    rows = [row for case in models_of(PART)[model] for row in measure(case)]
    for row in rows:
        assert holds(row), row
    assert any("logits" in row for row in rows) or "bitsandbytes" in rows[0]["refused"]


def test_the_part_holds_every_value_and_the_whole_every_combination():
    daily = [case for model in DAILY for case in models_of(PART)[model]]
    assert {case.variant for case in daily} == set(VARIANTS)
    assert {case.checkpointing for case in daily} == set(CHECKPOINTING)
    assert {case.dtype for case in daily} == set(DTYPES)
    assert {case.window for case in daily} == {*WINDOWS, "none"}
    archs = {(case.arch, case.window) for case in PART}
    assert len(cases()) == len(set(cases())) == len(archs) * len(VARIANTS) * 4 * 4 * 4


def part_file(path, rows, **head):
    about = {"versions": {"torch": "1"}, "python": "3", "document_lengths": [1], "factor": 1.5, "device": "a"}
    path.write_text(json.dumps({**about, "seconds": 1.5, **head, "rows": rows}))
    return path


def test_parts_become_one_result_in_which_the_last_word_counts(tmp_path):
    first, second = ({**vars(case), "captured": False, "loss": 2.0} for case in cases(arch=["llama"])[:2])
    paths = [
        part_file(tmp_path / "1.json", [first, second]),
        part_file(tmp_path / "2.json", [first | {"loss": 1.0}], device="b"),
    ]
    head, rows = joined(paths, 3)
    assert sorted(row["loss"] for row in rows) == [1.0, 2.0]
    assert (head["device"], head["seconds"], head["complete"]) == ("a, b", 3.0, False)
    assert joined(paths, 2)[0]["complete"]
    other = part_file(tmp_path / "3.json", [], versions={"torch": "2"})
    with pytest.raises(ValueError, match=r"3.json differs from .*1.json in versions; join parts of one grid"):
        joined([*paths, other], 2)


# What is planted


@pytest.fixture
def few_draws(monkeypatch):
    """A planted fault is above the bound on any draw; 64 of them only take longer."""
    monkeypatch.setattr(judging, "NUMBERS_OF_DRAWS", (1, 4))


def failures(variant, dtype="float32"):
    row, _ = measure(Case("llama", "none", variant, dtype, "sdpa", "False"))
    return row.get("failed", [])


def loads_unscaled(base, folder, load=models.load_adapter):
    loaded = load(base, folder)
    for layer in loaded.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["default"] = 1.0  # of 2
    return loaded


def is_scaled_as_plain(layer, frozen=layers.FastLoraLinear.frozen):
    return frozen(layer)._replace(scaling=8 / layer.r["default"])


@staticmethod
def loses_biases(ctx, *grads, backward=layers._LoraLinears.backward):
    lost = list(backward(ctx, *grads))
    lost[3::3] = [None if grad is None else torch.zeros_like(grad) for grad in lost[3::3]]
    return tuple(lost)


def drops_no_gradients(layer, x, first_row, add_to=None, drop=arithmetic.Layer.apply_dropout):
    return drop(layer, x, first_row) if add_to is None else add_to.add_(x)


def is_nan(*args, gradients=arithmetic.backward_to_bs):
    return [b * math.nan for b in gradients(*args)]


def is_missing(*args, gradients=arithmetic.backward_to_bs):
    return [None for _ in gradients(*args)]


def breaks(*args):
    raise RuntimeError("broken\nhere")


PLANTED = [  # the variant and dtype that see it, and what fails
    (models, "load_adapter", loads_unscaled, "two stages", "float32", r"logits: "),
    (layers.FastLoraLinear, "frozen", is_scaled_as_plain, "rslora", "float32", r"logits: "),
    (layers._LoraLinears, "backward", loses_biases, "bias", "bfloat16", r".*\.bias: "),
    (arithmetic, "_has_dropout", lambda layers: False, "dropout", "bfloat16", r"logits: "),
    (arithmetic.Layer, "apply_dropout", drops_no_gradients, "dropout", "bfloat16", r"(?!logits)"),
    (arithmetic, "backward_to_bs", is_nan, "plain", "float32", r".*lora_B.*inf times plain \(nan\)"),
    (
        arithmetic,
        "backward_to_bs",
        is_missing,
        "plain",
        "float32",
        r"gradients on one side only: ",
    ),
    (arithmetic, "forward", breaks, "plain", "float32", r"RuntimeError: broken here$"),
]


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(("owner", "name", "fault", "variant", "dtype", "says"), PLANTED)
def test_what_is_planted_fails_where_it_matters(owner, name, fault, variant, dtype, says, monkeypatch):
    assert not failures(variant, dtype)
    monkeypatch.setattr(owner, name, fault)
    failed = failures(variant, dtype)
    assert any(re.match(says, text) for text in failed), failed
    if variant != "plain":
        assert not failures("plain", dtype)


@pytest.mark.parametrize("checkpointing", ["False", "True"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3"])  # without biases, with some, with joined layers
def test_the_adapters_own_bias(monkeypatch, arch, dtype, checkpointing):
    monkeypatch.setitem(VARIANTS, "lora_bias", {"lora_bias": True})
    (row, _) = measure(Case(arch, "none", "lora_bias", dtype, "sdpa", checkpointing))
    assert holds(row), row
    assert "logits" in row or "bitsandbytes" in row["refused"]
    assert "unfused" not in row


class Replayed:
    """Takes the place of a captured shape: runs the row it is given, padded."""

    def __init__(self, decoder, bucket, device, memory, windows):
        self.decoder, self.bucket = decoder, bucket

    def launch(self, row, input_ids):
        return input_ids

    def output(self, row, input_ids):
        n_padding = self.bucket.tokens - row.n_tokens
        padded = PackedRow.of_lengths([*row.lengths, n_padding], row.device)
        ids = torch.nn.functional.pad(input_ids, (0, n_padding))
        hidden = self.decoder._packed_forward(padded, ids, None).last_hidden_state
        return StepOutput(hidden[:, : row.n_tokens], None)


class Stale(Replayed):
    """Whose static buffers are not filled anew."""

    def launch(self, row, input_ids):
        self.first = getattr(self, "first", input_ids)
        return self.first


@pytest.fixture
def captures(monkeypatch):
    """Steps that CUDA graphs would hold if they ran here."""
    monkeypatch.setattr("unsloth_pack.patching.patch._why_never_captured", lambda *_: None)
    return lambda bucket: monkeypatch.setattr("unsloth_pack.cuda_graphs.step.capture_bucket", bucket)


def rows_of(checkpointing, variant="dropout"):
    return measure(Case("llama", "none", variant, "float32", "sdpa", checkpointing))


@pytest.mark.usefixtures("few_draws")
def test_a_captured_step_is_judged_as_it_is_replayed(captures):
    captures(Replayed)
    for row in rows_of("False"):
        assert holds(row)
        assert "logits" in row
    for row in rows_of("True"):  # recomputed layers are captured too
        assert holds(row)
    captures(Stale)
    uncaptured, captured = rows_of("False")
    assert holds(uncaptured)
    assert any(text.startswith("logits: ") for text in captured["failed"])


# How outcomes are judged


def outcome(noise, seed):
    """1000 logits and a gradient around 1, off by `noise`."""
    generator = torch.Generator().manual_seed(seed)
    logits, grad = 1 + noise * torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    return Outcome(logits, torch.tensor(1.0).double(), {"lora_A": grad}, {})


def verdict(ours, alone, same_row):
    return judge([ours], [Draw(outcome(0, 0), alone, same_row)], torch.bfloat16)


def test_the_greater_of_plains_errors_is_the_yardstick():
    row = verdict(outcome(1.4e-3, 1), outcome(1e-4, 2), outcome(1e-3, 3))
    assert holds(row)
    assert row["gradient"] == pytest.approx(1.4, rel=0.1)
    assert row["of_same_row"] < 1.6 < 10 < row["of_alone"]
    assert row["other_gradient"] is None
    assert not holds(verdict(outcome(1.7e-3, 1), outcome(1e-4, 2), outcome(1e-3, 3)))


def test_what_is_not_finite_passes_only_where_plain_is_not_either():
    good, bad = (outcome(1e-3, seed) for seed in (1, 4))
    bad.grads["lora_A"][7] = math.inf
    assert holds(verdict(good, good, bad))
    assert "inf times plain" in verdict(bad, good, bad)["failed"][0]
    row = verdict(bad, bad, copy.deepcopy(bad))
    assert row["not_finite"] == ["lora_A"]
    assert row["gradient"] is None
    assert holds(row)


def test_a_truth_of_another_model_judges_nothing():
    wrong = outcome(0.5, 1)
    assert "no truth to judge by" in verdict(wrong, wrong, wrong)["failed"][0]


def test_luck_averages_out_over_draws_and_a_fault_does_not():
    draws = [Draw(outcome(0, 0), outcome(1e-3, seed), outcome(1e-3, seed)) for seed in range(4)]
    unlucky = [outcome(2e-3, 9), *(outcome(1e-3, seed) for seed in (10, 11, 12))]
    faulty = [outcome(2e-3, seed) for seed in range(9, 13)]
    assert not holds(judge(unlucky[:1], draws[:1], torch.bfloat16))
    assert holds(judge(unlucky, draws, torch.bfloat16))
    assert not holds(judge(faulty, draws, torch.bfloat16))


# The command


def test_a_process_that_dies_fails_the_case_that_it_was_at():
    first, second = cases(arch=["llama"], variant=["plain"], dtype=["float32"], backend=["sdpa"])[:2]
    worker = _Worker([first, second])
    worker._process.kill()
    rows = worker.receive()
    assert [row["failed"] for row in rows] == [["the process died with exit code -9"]] * 2
    assert rows[0]["checkpointing"] == first.checkpointing
    assert worker.is_lost(rows)
    assert worker.cases == [second]
    worker.end()


def test_rows_come_from_processes_and_a_run_that_is_cut_says_so(capsys, tmp_path, monkeypatch):
    path = tmp_path / "grid.json"
    part = ["--arch", "llama", "--variant", "plain", "--dtype", "float32", "--checkpointing", "auto"]
    monkeypatch.setattr("sys.argv", ["grid.py", *part, "--workers", "1", "--json", str(path)])
    assert grid.main() == 0
    written = json.loads(path.read_text())
    assert written["complete"]
    assert [(row["backend"], row["captured"]) for row in written["rows"]] == [
        (backend, captured) for backend in BACKENDS for captured in (False, True)
    ]
    assert written["rows"][-2]["plan"] == "1 of 2 layers are recomputed"
    assert "| llama        | sdpa     | float32 " in path.with_suffix(".md").read_text()
    monkeypatch.setattr("sys.argv", [*sys.argv, "--minutes", "0"])
    assert grid.main() == 1
    assert not json.loads(path.read_text())["complete"]
    assert f"**Partial**: 0 of {2 * len(BACKENDS)} rows" in capsys.readouterr().out
