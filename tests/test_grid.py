"""A part of the correctness grid on this device, and that the grid sees what is planted."""

import re

import pytest
import torch
from correctness import judge as judging
from correctness.cases import Case, cases
from correctness.judge import Draw, holds, judge
from correctness.measure import measure
from tiny import Outcome

from unsloth_pack.lora import arithmetic, base_model
from unsloth_pack.lora import linear as layers

PART = dict.fromkeys(
    [
        *cases(variant=["plain"], dtype=["bfloat16", "float32"], checkpointing=["False", "True"]),
        *cases(arch=["qwen2", "gemma3_text"], window=["short"], dtype=["bfloat16"], checkpointing=["False"]),
        *cases(arch=["llama"], variant=["plain"], dtype=["float16", "nf4"]),
        *cases(
            arch=["llama", "gemma2", "gpt_oss", "gemma4_text", "deepseek_v3"],
            window=["short", "none"],
            variant=["branches"],
            dtype=["bfloat16", "float32"],
            checkpointing=["False"],
        ),
        *cases(
            arch=["llama", "gemma2", "granite", "qwen3_moe", "lfm2"],
            window=["short", "none"],
            variant=["distillation", "reverse_kl", "jsd"],
            dtype=["bfloat16", "float32"],
            checkpointing=["False", "True"],
        ),
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
        *cases(variant=["sharded"], backend=["sdpa"], checkpointing=["False", "True"]),
    ]
)
DAILY = (  # of them all variants, dtypes, windows and ways of checkpointing
    ("llama", "none", "plain", "nf4"),
    ("llama", "none", "plain", "float16"),
    ("gpt_oss", "short", "branches", "bfloat16"),
    ("deepseek_v3", "none", "branches", "float32"),
    ("qwen3_moe", "none", "distillation", "bfloat16"),
    ("gemma2", "short", "reverse_kl", "bfloat16"),
    ("granite", "none", "jsd", "float32"),
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
    ("llama", "none", "sharded", "nf4"),
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
    measured = any("logits" in row for row in rows)
    assert measured or re.search(r"bitsandbytes|share a GPU|autocast", rows[0]["refused"])


def test_branches_that_share_nothing_say_why():
    row, _ = measure(Case("lfm2", "none", "branches", "float32", "sdpa", "False"))
    assert row["unshared"] == "a layer carries a state from token to token"
    assert holds(row)
    assert "gradient" in row


# What is planted


@pytest.fixture
def few_draws(monkeypatch):
    """A planted fault is above the bound on any draw; 64 of them only take longer."""
    monkeypatch.setattr(judging, "NUMBERS_OF_DRAWS", (1, 4))


def failures(variant, dtype="float32"):
    row, _ = measure(Case("llama", "none", variant, dtype, "sdpa", "False"))
    return row.get("failed", [])


def is_scaled_as_plain(layer, frozen=layers.FastLoraLinear.frozen):
    return frozen(layer)._replace(scaling=8 / layer.r["default"])


@staticmethod
def loses_biases(ctx, *grads, backward=layers._LoraLinears.backward):
    lost = list(backward(ctx, *grads))
    lost[3::3] = [None if grad is None else torch.zeros_like(grad) for grad in lost[3::3]]
    return tuple(lost)


def is_missing(*args, gradients=arithmetic.backward_to_bs):
    return [None for _ in gradients(*args)]


def breaks(*args):
    raise RuntimeError("broken\nhere")


PLANTED = [  # the variant and dtype that see it, and what fails
    (layers.FastLoraLinear, "frozen", is_scaled_as_plain, "rslora", "float32", r"logits: "),
    (layers._LoraLinears, "backward", loses_biases, "bias", "bfloat16", r".*\.bias: "),
    (arithmetic, "_has_dropout", lambda layers: False, "dropout", "bfloat16", r"logits: "),
    (
        arithmetic,
        "backward_to_bs",
        is_missing,
        "plain",
        "float32",
        r"gradients on one side only: ",
    ),
    (base_model, "_list_adapted", lambda model: [], "distillation", "float32", r".*\.lora_B"),
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


# How outcomes are judged


def outcome(noise, seed):
    """1000 logits and a gradient around 1, off by `noise`."""
    generator = torch.Generator().manual_seed(seed)
    logits, grad = 1 + noise * torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    return Outcome(logits, torch.tensor(1.0).double(), {"lora_A": grad}, {})


def test_luck_averages_out_over_draws_and_a_fault_does_not():
    draws = [Draw(outcome(0, 0), outcome(1e-3, seed), outcome(1e-3, seed)) for seed in range(4)]
    unlucky = [outcome(2e-3, 9), *(outcome(1e-3, seed) for seed in (10, 11, 12))]
    faulty = [outcome(2e-3, seed) for seed in range(9, 13)]
    assert not holds(judge(unlucky[:1], draws[:1], torch.bfloat16))
    assert holds(judge(unlucky, draws, torch.bfloat16))
    assert not holds(judge(faulty, draws, torch.bfloat16))


# The command
